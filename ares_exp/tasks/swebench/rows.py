"""`SweBenchRow`: one row of a SWE-bench data set, validated. Rows may come from anybody's file.

The columns are those of the data sets `SWE-bench/SWE-bench` and its parts (Verified, Lite) on the Hugging Face hub;
`image`, `eval_script`, `log_parser` and `eval_type` are there since version 5 of the official harness.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ares_exp.errors import TaskError

MAX_TEXT_CHARS = 16 * 2**20
MAX_TESTS = 50_000
MAX_ROWS = 100_000


def _encodable(text: str) -> str:
    try:
        text.encode()  # a lone surrogate, legal in JSON, could not be sent anywhere
    except UnicodeEncodeError:
        raise ValueError("expected text that can be written as UTF-8") from None
    return text


def _none_is_empty(value: Any) -> Any:
    return "" if value is None else value


def _from_json(value: Any) -> Any:
    """The data sets hold lists and tables as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise ValueError("expected a list, or one as JSON text") from None


Text = Annotated[str, BeforeValidator(_none_is_empty), Field(max_length=MAX_TEXT_CHARS), AfterValidator(_encodable)]
TestName = Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(_encodable)]
TestNames = Annotated[tuple[TestName, ...], BeforeValidator(_from_json), Field(max_length=MAX_TESTS)]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}(?:[0-9a-f]{24})?$")]


class SweBenchRow(BaseModel):
    """One problem of SWE-bench. Other columns are ignored.

    Attributes:
        instance_id: Unique name, `owner__name-number`.
        repo: `owner/name` of the repository.
        base_commit: All digits of the commit that the problem was fixed on.
        problem_statement: The issue.
        hints_text: What was said under the issue before the fix.
        patch: The fix.
        test_patch: What the fix brought for the tests.
        fail_to_pass: Tests that fail without the fix and pass with it.
        pass_to_pass: Tests that pass before and after.
        image: The image's name.
        eval_script: The script that applies the test patch and runs the tests.
        log_parser: Name of the harness's function that reads its output.
        eval_type: `fail_only` where the output tells of failures alone.
        image_assets: Files that no patch can carry: the row is of the multimodal data set.
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
        """Whether files belong to it that no patch can carry."""
        return any((self.image_assets or {}).values())

    @cached_property
    def digest(self) -> str:
        """`sha256:` and the hex digest of what it says."""
        return f"sha256:{hashlib.sha256(self.model_dump_json().encode()).hexdigest()}"


def parse_row(data: Any, where: str) -> SweBenchRow:
    """Validates a row.

    Args:
        data: The row.
        where: The file and the number of the row, for messages.

    Raises:
        TaskError: It is no row; the message names every column that is wrong.
    """
    if not isinstance(data, dict):
        raise TaskError(f"{where}: expected a table with the columns of SWE-bench, got a {type(data).__name__}.")
    if isinstance(data.get("instance_id"), str):
        where += f" ({data['instance_id']!r:.100})"
    try:
        return SweBenchRow.model_validate(data)
    except ValidationError as error:
        wrong = "; ".join(_explain(item) for item in error.errors(include_url=False, include_context=False)[:5])
        raise TaskError(f"{where}: {wrong}.") from None


def _explain(item: Any) -> str:
    column = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"{column}: expected this column, found none"
    message = item["msg"].removeprefix("Value error, ")
    return f"{column}: {message[0].lower()}{message[1:]}, got {reprlib.repr(item['input'])}"


def parse_rows(found: Iterable[tuple[int, Any]], source: str) -> list[SweBenchRow]:
    """Validates the rows of a data set.

    Args:
        found: Number and content of each.
        source: Where they are from, for messages.

    Raises:
        TaskError: One is no row, two have the same name, there are too many, or none.
    """
    rows: dict[str, SweBenchRow] = {}
    for number, data in found:
        where = f"{source}: row {number}"
        row = parse_row(data, where)
        if row.instance_id in rows:
            raise TaskError(f"{where}: the name {row.instance_id!r} is taken by a row before it. Remove one of them.")
        if len(rows) == MAX_ROWS:
            raise TaskError(f"{source}: expected at most {MAX_ROWS:,} rows, found more.")
        rows[row.instance_id] = row
    if not rows:
        raise TaskError(f"{source}: expected rows of SWE-bench, found none.")
    return list(rows.values())
