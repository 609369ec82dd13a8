"""snapshot.json as untrusted data: parsing, checksum, and field types."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetPydanticSchema
from typing_extensions import TypedDict

from ares_exp.errors import SnapshotCorruptError, SnapshotMetadataError, SnapshotNotFoundError
from ares_exp.records.validation import Number, Table, Text, briefly

MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_INTEGER_BITS = 1000
"""Maximum size of an integer, which still fits into a float. States of random generators contain long integers."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file. Rejects links and files of more than `MAX_FILE_BYTES`.

    Raises:
        SnapshotNotFoundError: The file does not exist.
        SnapshotMetadataError: The file cannot be read, or does not contain a JSON object.
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
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, NaN, bytes that are not UTF-8, …
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
        raise SnapshotNotFoundError(f"There is no snapshot at {path}.") from None
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise SnapshotMetadataError(f"Cannot read {path}: {reason}.") from None
    except ValueError as error:  # a path with a null byte
        raise SnapshotMetadataError(f"Cannot read {str(path)!r}: {error}.") from None
    if len(text) > MAX_FILE_BYTES:
        raise SnapshotMetadataError(f"{path}: expected at most {MAX_FILE_BYTES:,} bytes, got more.")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def check_json(data: Any, where: str) -> None:
    """Rejects values that JSON cannot represent, non-finite or huge numbers, and deep nesting.

    Raises:
        SnapshotMetadataError: A value is invalid. The message gives its place in `data`.
    """
    level: list[tuple[str, Any]] = [("", data)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[str, Any]] = []
        for name, value in level:
            if isinstance(value, dict):
                for key, item in value.items():
                    if type(key) is not str:
                        raise SnapshotMetadataError(
                            f"{where}: expected keys to be strings, got {briefly(key)}{_in(name)}."
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


CHECKSUM = "checksum"
_NOT_INCLUDED = (CHECKSUM, "snapshot_dir")


def digest_of(content: Mapping[str, Any]) -> str:
    """Returns `sha256:…` of the canonical JSON text of `content`."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def with_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the document with the checksum of its content."""
    return {**data, CHECKSUM: _checksum_of(data)}


def check_checksum(data: Mapping[str, Any], where: str) -> None:
    """Checks that the content of a document matches its checksum.

    Raises:
        SnapshotCorruptError: The checksum differs from the content.
        SnapshotMetadataError: The checksum is missing or malformed.
    """
    found = data.get(CHECKSUM)
    if not isinstance(found, str) or not found.startswith("sha256:"):
        raise SnapshotMetadataError(f"{where}: expected `{CHECKSUM}` to be sha256:…, got {briefly(found)}.")
    if found != _checksum_of(data):
        raise SnapshotCorruptError(
            f"{where}: its content does not match its `{CHECKSUM}`, so it was changed or damaged after it was "
            "written. Use another snapshot, or an undamaged copy of this one."
        )


def _checksum_of(data: Mapping[str, Any]) -> str:
    return digest_of({name: value for name, value in data.items() if name not in _NOT_INCLUDED})


def absolute(path: Any) -> Path:
    """Returns the directory that a copied snapshot.json contains. Raises `ValueError` if the path is not absolute."""
    try:
        if isinstance(path, str) and os.fsencode(path).startswith(b"/") and "\0" not in path:
            return Path(path)
    except UnicodeError:
        pass
    raise ValueError(f"expected `snapshot_dir` to be an absolute path, got {briefly(path)}")


def _in_utc(time: str) -> str:
    try:
        if datetime.fromisoformat(time).utcoffset() == timedelta(0):
            return time
    except ValueError:
        pass
    raise ValueError("expected a time in UTC with its offset, such as 2026-01-31T12:00:00+00:00")


Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", strict=True)]
"""The sha256 of an object's content, which is the object's name."""
UtcTime = Annotated[str, Field(strict=True), AfterValidator(_in_utc)]


class _TimeStep(TypedDict):
    """The pending time step."""

    step_type: Literal["FIRST", "MID"]
    reward: Number | None
    discount: Number | None


class _Container(TypedDict, total=False):
    """Facts about the container. Missing fields are unknown."""

    options: Table
    workdir: Text | None
    env_names: list[Text]
    processes: list[Any]
    not_captured: list[Text]


class _Agent(TypedDict, total=False):
    """Facts about the agent. Missing fields are unknown."""

    factory: Text
    options: Table
    source_digest: Text | None
    state: Digest | None
    state_version: Count | None


class _PastStage(TypedDict):
    """A finished stage of the task."""

    journal: list[Digest]


class _Episode(TypedDict, total=False):
    """The finished stages, which contain digests of objects. `EpisodeFacts` checks the other facts on reading."""

    past_stages: list[_PastStage]


def _like(kind: Any) -> GetPydanticSchema:
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(kind))


TimeStepFields = Annotated[Mapping[str, Any], _like(_TimeStep)]
ContainerFields = Annotated[Mapping[str, Any], _like(_Container)]
AgentFields = Annotated[Mapping[str, Any], _like(_Agent)]
EpisodeFields = Annotated[Mapping[str, Any], _like(_Episode)]
