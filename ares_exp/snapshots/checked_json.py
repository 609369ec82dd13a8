"""Reads JSON that anybody may have written: each field has its type and bounds, or an error names it."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from ares_exp.errors import SnapshotMetadataError, SnapshotNotFoundError

MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_INTEGER_BITS = 1000
"""What fits into a float; the states of random generators have long integers."""
DIGEST = re.compile(r"[0-9a-f]{64}")
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def briefly(value: object) -> str:
    """The beginning of what a file holds, without anything that a terminal would obey."""
    return ascii(value) if isinstance(value, float) else _REPR.repr(value)[:80]


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file: a plain file, not a link, and not longer than `MAX_FILE_BYTES`.

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


class Fields:
    """The fields of one JSON object that has passed `check_json`. Every method raises `SnapshotMetadataError`."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        """`where` is what messages begin with: the file, or the file and the field."""
        self._data = data
        self._where = where

    def wrong(self, name: str, expected: str) -> SnapshotMetadataError:
        """What to raise of a field that is not as it should be."""
        if name not in self._data:
            return SnapshotMetadataError(f"{self._where}: expected `{name}` to be {expected}, but it is missing.")
        return SnapshotMetadataError(
            f"{self._where}: expected `{name}` to be {expected}, got {briefly(self._data[name])}."
        )

    def text(self, name: str, *, choices: Collection[str] = ()) -> str:
        """A text, one of `choices` if there are any."""
        value = self._data.get(name)
        if not isinstance(value, str) or (choices and value not in choices):
            raise self.wrong(name, f"one of {', '.join(choices)}" if choices else "a text")
        return value

    def optional_text(self, name: str) -> str | None:
        """A text or `null`."""
        value = self._data.get(name)
        if name not in self._data or not (value is None or isinstance(value, str)):
            raise self.wrong(name, "a text or null")
        return value

    def absolute_path(self, name: str) -> Path:
        """A path that can be one, and does not depend on where this process happens to be."""
        value = self.text(name)
        try:
            if os.fsencode(value).startswith(b"/") and "\0" not in value:
                return Path(value)
        except UnicodeError:
            pass
        raise self.wrong(name, "an absolute path")

    def integer(self, name: str) -> int:
        """An integer of at least 0, below 2**63."""
        value = self._data.get(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.wrong(name, "an integer of at least 0")
        return value

    def optional_integer(self, name: str) -> int | None:
        """An integer as above, or `null`."""
        if name in self._data and self._data[name] is None:
            return None
        value = self._data.get(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.wrong(name, "an integer of at least 0, or null")
        return value

    def optional_number(self, name: str) -> float | None:
        """A number or `null`."""
        value = self._data.get(name)
        if name not in self._data or not (value is None or type(value) in (int, float)):
            raise self.wrong(name, "a number or null")
        number: float | None = value
        return number

    def false(self, name: str) -> None:
        """`false`, nothing else."""
        if self._data.get(name) is not False:
            raise self.wrong(name, "false")

    def time(self, name: str) -> str:
        """A moment in UTC, ISO 8601 with an offset."""
        value = self.text(name)
        try:
            if datetime.fromisoformat(value).utcoffset() == timedelta(0):
                return value
        except ValueError:
            pass
        raise self.wrong(name, "a time in UTC with its offset, such as 2026-01-31T12:00:00+00:00")

    def table(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        value = self._data.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "a JSON object")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        value = self._data.get(name)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of texts")
        return tuple(value)

    def items(self, name: str) -> tuple[Any, ...]:
        """A list of anything."""
        value = self._data.get(name)
        if not isinstance(value, list | tuple):
            raise self.wrong(name, "a list")
        return tuple(value)

    def digests(self, name: str) -> tuple[str, ...]:
        """Names of objects."""
        value = self._data.get(name)
        if not isinstance(value, list | tuple) or not all(is_digest(item) for item in value):
            raise self.wrong(name, "a list of sha256 digests, each of 64 hexadecimal digits")
        return tuple(value)

    def optional_digest(self, name: str) -> str | None:
        """The name of an object, or `null`."""
        value = self._data.get(name)
        if name not in self._data or not (value is None or is_digest(value)):
            raise self.wrong(name, "a sha256 digest of 64 hexadecimal digits, or null")
        digest: str | None = value
        return digest


def is_digest(value: object) -> bool:
    """Whether something can be the name of an object."""
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None
