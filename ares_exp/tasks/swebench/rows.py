"""Functions that find SWE-bench data sets, read their rows, and validate them.

Rows may come from the Hugging Face hub or from a file. They must have the columns of the data set `SWE-bench/SWE-bench`
on the hub. Version 5 of the official harness introduced the columns `image`, `eval_script`, `log_parser` and
`eval_type`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ares_exp.containers.child_process import ChildFailedError, ChildProcess
from ares_exp.containers.ownership import short_lived_directory
from ares_exp.containers.user_cache import announce
from ares_exp.errors import ConfigError, PreflightError, TaskError
from ares_exp.tasks.task_toml import explain

MAX_TEXT_CHARS = 16 * 2**20
MAX_TESTS = 50_000
MAX_ROWS = 100_000


def _from_json(value: Any) -> Any:
    """Parses a list that some data sets store as JSON text. Returns a value that is not a string unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise ValueError("expected a list, or a list as JSON text") from None


# Strings with a maximum length must be valid Unicode: pydantic rejects a lone surrogate, which is legal in JSON.
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS), BeforeValidator(lambda value: "" if value is None else value)]
TestName = Annotated[str, Field(min_length=1, max_length=10_000)]
TestNames = Annotated[tuple[TestName, ...], BeforeValidator(_from_json), Field(max_length=MAX_TESTS)]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}(?:[0-9a-f]{24})?$")]


class SweBenchRow(BaseModel):
    """A row of SWE-bench, which describes one problem. Other columns are ignored.

    Attributes:
        instance_id: Unique name of the form `owner__name-number`.
        repo: Repository, as `owner/name`.
        base_commit: Full hash of the commit on which the fix is based.
        problem_statement: Text of the issue.
        hints_text: Comments on the issue that were written before the fix.
        patch: The fix, without changes to tests.
        test_patch: The changes to tests that belong to the fix.
        fail_to_pass: Tests that fail without the fix and pass with it.
        pass_to_pass: Tests that pass with and without the fix.
        image: Name of the container image; empty if unknown.
        eval_script: Script that applies the test patch and runs the tests.
        log_parser: Name of the harness's function that parses the output of the script.
        eval_type: `fail_only` if the output lists only failed tests, otherwise `pass_and_fail`.
        image_assets: Image files that belong to the row, only in the multimodal data set. A patch cannot contain them.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    instance_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$")]
    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
    base_commit: Commit
    problem_statement: Text
    hints_text: Text = ""
    patch: Text
    test_patch: Text
    fail_to_pass: Annotated[TestNames, Field(alias="FAIL_TO_PASS", min_length=1)]
    pass_to_pass: Annotated[TestNames, Field(alias="PASS_TO_PASS")]
    image: Annotated[Text, Field(pattern=r"^(?:[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254})?$")] = ""
    eval_script: Text = ""
    log_parser: Annotated[Text, Field(pattern=r"^\w{0,100}$")] = ""
    eval_type: Annotated[
        Literal["pass_and_fail", "fail_only"], BeforeValidator(lambda value: value or "pass_and_fail")
    ] = "pass_and_fail"
    image_assets: Annotated[dict[str, Any] | None, BeforeValidator(_from_json)] = None

    @property
    def is_multimodal(self) -> bool:
        """Whether the row needs binary files in addition to its patches. Such rows are not supported."""
        return any((self.image_assets or {}).values())

    @cached_property
    def digest(self) -> str:
        """`sha256:` and the hex digest of the row's content."""
        return f"sha256:{hashlib.sha256(self.model_dump_json().encode()).hexdigest()}"


def parse_row(data: Any, where: str) -> SweBenchRow:
    """Validates one row, which is at the location `where`. Raises a `TaskError` that names every invalid column."""
    if not isinstance(data, dict):
        raise TaskError(f"{where}: expected a table with the columns of SWE-bench, got a {type(data).__name__}.")
    if isinstance(data.get("instance_id"), str):
        where += f" ({data['instance_id']!r:.100})"
    try:
        return SweBenchRow.model_validate(data)
    except ValidationError as error:
        raise TaskError(f"{where}: {explain(error, data, root='the row'):.1000}.") from None


def parse_rows(found: Iterable[tuple[int, Any]], source: str) -> list[SweBenchRow]:
    """Validates the rows of a data set. `found` contains pairs of a row's number and its content.

    Raises:
        TaskError: A row is invalid, two rows have the same name, or the data set is empty or too large.
    """
    rows: dict[str, SweBenchRow] = {}
    for number, data in found:
        where = f"{source}: row {number}"
        row = parse_row(data, where)
        if row.instance_id in rows:
            raise TaskError(f"{where}: an earlier row also has the name {row.instance_id!r}. Remove one of the rows.")
        if len(rows) == MAX_ROWS:
            raise TaskError(f"{source}: the data set has more than {MAX_ROWS:,} rows.")
        rows[row.instance_id] = row
    if not rows:
        raise TaskError(f"{source}: expected rows of SWE-bench, found none.")
    return list(rows.values())


MAX_LINE_BYTES = 64 * 2**20


def read_row_file(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the line number and the content of each row of a JSON Lines file. Blocking."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise TaskError(f"{path}: row {number}: the row has more than {MAX_LINE_BYTES:,} bytes.")
                if line.strip():
                    yield number, json.loads(line)
    except OSError as error:
        raise TaskError(
            f"{path}: the file of SWE-bench rows cannot be read: {error.strerror}. Set env.dataset to another file."
        ) from None
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path}: row {number}: invalid JSON: {error}.") from None


FILES = {".jsonl": "", ".json": "json", ".parquet": "parquet"}
"""Readers in the library `datasets`, by file suffix. Empty for `.jsonl`, because such files are read directly."""

NAMES = {
    "verified": "SWE-bench/SWE-bench_Verified",
    "lite": "SWE-bench/SWE-bench_Lite",
    "full": "SWE-bench/SWE-bench",
}
"""Short names of data sets on the hub. Full names are also accepted, such as `princeton-nlp/SWE-bench`."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FETCH_ROWS = Path(__file__).with_name("fetch_rows.py")


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set on the Hugging Face hub or in a file.

    Attributes:
        file: Path of a file of rows; `None` for a data set on the Hugging Face hub.
        hub_name: Name on the hub, as `owner/name`; empty for a file.
        split: Split of the data set on the hub.
    """

    file: Path | None
    hub_name: str
    split: str

    @property
    def source(self) -> str:
        """Name of the data set in messages: the path of its file, or `owner/name:split`."""
        return str(self.file) if self.file is not None else f"{self.hub_name}:{self.split}"


def find_dataset(dataset: str, split: str) -> Dataset:
    """Returns the data set for the options `env.dataset` and `env.split`, without reading it.

    Raises:
        ConfigError: A name is invalid, or the data set is multimodal.
    """
    choices = f"{', '.join(NAMES)}, owner/name of the Hugging Face hub, or a file ({', '.join(FILES)})"
    if Path(dataset).suffix in FILES:
        return Dataset(Path(dataset).expanduser().absolute(), "", split)
    name = NAMES.get(dataset.lower(), dataset)
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"Expected `env.dataset` to be {choices}, got {dataset!r:.200}.")
    if "multimodal" in name.lower():
        raise ConfigError(f"{name}: the multimodal SWE-bench is not supported. Choose another data set: {choices}.")
    if not re.fullmatch(r"\w[\w.-]{0,99}", split):
        raise ConfigError(f"Expected `env.split` to be the name of a split, got {split!r:.100}.")
    return Dataset(None, name, split)


def load_rows(dataset: Dataset, *, child: ChildProcess, timeout_sec: float) -> list[SweBenchRow]:
    """Reads and validates all rows. Blocking.

    A JSON Lines file is read directly. Other files, and data sets on the hub or in its cache, are loaded by the library
    `datasets`. The library runs in the child process `child`, which the caller can stop, for at most `timeout_sec`.

    Raises:
        TaskError: A row or the file is invalid.
        ConfigError: A package is missing.
        PreflightError: The data set could not be loaded.
    """
    file = dataset.file
    if file is not None and not FILES[file.suffix]:
        return parse_rows(read_row_file(file), dataset.source)
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"{dataset.source}: this data set needs the package datasets. Run `pip install 'ares-exp[swebench]'`, or "
            "set env.dataset=<a .jsonl file of its rows>."
        )
    where = f"{dataset.hub_name} (split {dataset.split})" if file is None else str(file)
    announce(f"Loading {where}{' from the Hugging Face hub or its cache' if file is None else ''}.")
    directory = short_lived_directory("build")
    try:
        rows = directory.path / "rows.jsonl"
        named = [dataset.hub_name, dataset.split, ""] if file is None else [FILES[file.suffix], "train", str(file)]
        child.run_python(_FETCH_ROWS, [*named, str(rows)], env=dict(os.environ), timeout_sec=timeout_sec)
        return parse_rows(read_row_file(rows), dataset.source)
    except ChildFailedError as error:
        raise PreflightError(
            f"The data set {where} could not be loaded: the process {str(error).rstrip('.')}. Check the file or the "
            "connection to the Hugging Face hub, or use `env.dataset=<a .jsonl file of its rows>`."
        ) from None
    finally:
        directory.remove()
