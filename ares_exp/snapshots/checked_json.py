"""JSON from anybody: read within bounds, and refused if it holds numbers that nothing can be computed with."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from ares_exp.errors import SnapshotMetadataError, SnapshotNotFoundError
from ares_exp.records.validation import briefly

MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_INTEGER_BITS = 1000
"""What fits into a float; the states of random generators have long integers."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a plain file, not a link, of at most `MAX_FILE_BYTES`.

    Raises:
        SnapshotNotFoundError: There is no such file.
        SnapshotMetadataError: It cannot be read, or holds something else.
    """
    text = _read(path)
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
        check_json(data, str(path))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise SnapshotMetadataError(f"{path}: expected JSON, but at {where}: {error.msg}.") from None
    except SnapshotMetadataError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, NaN, bytes that are no text, …
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SnapshotMetadataError(f"{path}: expected JSON, but {what}.") from None
    if not isinstance(data, dict):
        raise SnapshotMetadataError(f"{path}: expected a JSON object, got {briefly(data)}.")
    return data


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SnapshotMetadataError(f"{path}: expected a file, got a directory, a pipe or a device.")
            with open(descriptor, "rb", closefd=False) as file:
                text = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        raise SnapshotNotFoundError(f"Expected a snapshot at {path}: there is no such file.") from None
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise SnapshotMetadataError(f"Cannot read {path}: {reason}.") from None
    except ValueError as error:  # a path with a null byte
        raise SnapshotMetadataError(f"Cannot read {str(path)!r}: {error}.") from None
    if len(text) > MAX_FILE_BYTES:
        raise SnapshotMetadataError(f"{path}: expected at most {MAX_FILE_BYTES:,} bytes, got more.")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def check_json(data: Any, where: str) -> None:
    """Refuses what JSON cannot say, numbers that nothing could be computed with, and what is nested deeply.

    Raises:
        SnapshotMetadataError: With where in `data` that is.
    """
    level: list[tuple[str, Any]] = [("", data)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[str, Any]] = []
        for name, value in level:
            if isinstance(value, dict):
                for key, item in value.items():
                    if type(key) is not str:
                        raise SnapshotMetadataError(
                            f"{where}: expected keys to be texts, got {briefly(key)}{_in(name)}."
                        )
                    below.append((name or key, item))
            elif isinstance(value, list | tuple):
                below += [(name, item) for item in value]
            elif not _is_plain(value):
                raise SnapshotMetadataError(f"{where}: expected plain JSON, got {briefly(value)}{_in(name)}.")
        if not below:
            return
        level = below
    raise SnapshotMetadataError(f"{where}: expected at most {MAX_DEPTH} levels, got more{_in(level[0][0])}.")


def _in(name: str) -> str:
    return f" in `{briefly(name)[1:-1]}`" if name else ""


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return value.bit_length() <= MAX_INTEGER_BITS
    return value is None or isinstance(value, str)
