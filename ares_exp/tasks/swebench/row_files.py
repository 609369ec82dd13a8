"""Files of rows: `.jsonl`, `.json` (a list, or a table of rows) and `.parquet`, read with bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError, TaskError

SUFFIXES = (".jsonl", ".json", ".parquet")
MAX_FILE_BYTES = 2 * 2**30
MAX_JSON_BYTES = 512 * 2**20
MAX_LINE_BYTES = 64 * 2**20
_ROWS_PER_BATCH = 32


def read_row_file(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields number, from 1 (of a `.jsonl`: the line), and content of each row. Blocking.

    Raises:
        TaskError: It cannot be read, is too large, or is not what its name says.
        ConfigError: A `.parquet`, and pyarrow is not installed.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TaskError(f"{path}: expected a file of SWE-bench rows: {error.strerror}. Set env.dataset.") from None
    most = MAX_JSON_BYTES if path.suffix == ".json" else MAX_FILE_BYTES
    if not path.is_file() or size > most:
        raise TaskError(f"{path}: expected a plain file of at most {most:,} bytes.")
    read = {".jsonl": _read_lines, ".json": _read_json, ".parquet": _read_parquet}[path.suffix]
    try:
        yield from read(path)
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror or error}.") from None


def _read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise TaskError(f"{path}: row {number}: expected at most {MAX_LINE_BYTES:,} bytes, found more.")
            if line.strip():
                yield number, _decoded(line, f"{path}: row {number}")


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    found = _decoded(path.read_bytes(), str(path))
    if isinstance(found, dict):
        found = list(found.values())
    if not isinstance(found, list):
        raise TaskError(f"{path}: expected a list of rows, got a {type(found).__name__}.")
    yield from enumerate(found, 1)


def _decoded(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: expected JSON, got: {error}.") from None


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{path}: Parquet files need the package pyarrow: `pip install 'ares-exp[parquet]'`."
        ) from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_PER_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise TaskError(f"{path}: expected a Parquet file, got: {error}.") from None
