"""Data sets of SWE-bench: a file of rows, or one of the Hugging Face hub by its name."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ares_exp.containers.ownership import short_lived_directory
from ares_exp.errors import ConfigError, PreflightError
from ares_exp.tasks.child_process import ChildFailedError, ChildProcess
from ares_exp.tasks.swebench.row_files import SUFFIXES, read_row_file
from ares_exp.tasks.swebench.rows import SweBenchRow, parse_rows

NAMES = {
    "verified": "SWE-bench/SWE-bench_Verified",
    "lite": "SWE-bench/SWE-bench_Lite",
    "full": "SWE-bench/SWE-bench",
}
"""Short names; the owner `princeton-nlp`, under which they were published first, works as well."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FETCH_ROWS = Path(__file__).with_name("fetch_rows.py")


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set.

    Attributes:
        file: A file of rows; `None`: of the hub.
        hub_name: `owner/name` on the Hugging Face hub; empty for a file.
        split: Part of a data set of the hub.
    """

    file: Path | None
    hub_name: str
    split: str

    @property
    def source(self) -> str:
        """Its name in messages."""
        return str(self.file) if self.file is not None else f"{self.hub_name}:{self.split}"


def find_dataset(dataset: str, split: str) -> Dataset:
    """Returns the data set that `env.dataset` and `env.split` name. Reads nothing.

    Raises:
        ConfigError: Nothing that is known, or the multimodal data set.
    """
    choices = f"{', '.join(NAMES)}, owner/name of the Hugging Face hub, or a file ({', '.join(SUFFIXES)})"
    if Path(dataset).suffix in SUFFIXES:
        return Dataset(Path(dataset).expanduser().absolute(), "", split)
    name = NAMES.get(dataset.lower(), dataset)
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"Expected `env.dataset` to be {choices}, got {dataset!r:.200}.")
    if "multimodal" in name.lower():
        raise ConfigError(f"{name}: rows of the multimodal SWE-bench are not supported. Choose another: {choices}.")
    if not re.fullmatch(r"\w[\w.-]{0,99}", split):
        raise ConfigError(f"Expected `env.split` to be the name of a split, got {split!r:.100}.")
    return Dataset(None, name, split)


def load_rows(dataset: Dataset, *, child: ChildProcess, timeout_sec: float) -> list[SweBenchRow]:
    """Reads and validates all rows. Blocking.

    A data set of the hub is loaded by the library `datasets`, from its cache where it is there.

    Args:
        dataset: Which.
        child: Loads data sets of the hub; whoever has it can stop that.
        timeout_sec: What that may take.

    Raises:
        TaskError: A row is wrong, or the file.
        ConfigError: A package is missing.
        PreflightError: The data set could not be loaded.
    """
    if dataset.file is not None:
        return parse_rows(read_row_file(dataset.file), dataset.source)
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"{dataset.hub_name}: data sets of the hub need the package datasets: `pip install 'ares-exp[swebench]'`; "
            "or set env.dataset=<a .jsonl or .parquet file of its rows>."
        )
    directory = short_lived_directory("build")
    try:
        rows = directory.path / "rows.jsonl"
        arguments = [dataset.hub_name, dataset.split, str(rows)]
        child.run_python(_FETCH_ROWS, arguments, env=dict(os.environ), timeout_sec=timeout_sec)
        return parse_rows(read_row_file(rows), dataset.source)
    except ChildFailedError as error:
        raise PreflightError(
            f"The data set {dataset.hub_name} (split {dataset.split}) could not be loaded: the program {error}. Is the "
            "hub within reach, or the data in its cache? Or set env.dataset=<a .jsonl or .parquet file of its rows>."
        ) from None
    finally:
        directory.remove()
