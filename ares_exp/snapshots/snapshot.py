"""`EnvironmentSnapshot`, the content of a snapshot.json, which describes an environment in the middle of an episode.

A snapshot.json is untrusted data, so every field is checked when the file is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, GetPydanticSchema
from typing_extensions import TypedDict

from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.errors import (
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMetadataError,
    SnapshotNotFoundError,
    SnapshotVersionError,
)
from ares_exp.records.run_dir import atomic_file, dump_json
from ares_exp.records.validation import Number, Table, Text, briefly, validated

SCHEMA = (1, 1)
"""The schema version of snapshot.json: the major and the minor number."""
SNAPSHOT_FILE = "snapshot.json"
OBJECTS = "objects"
MAX_MESSAGES_BYTES = 256 * 2**20
MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_INTEGER_BITS = 1000
"""Maximum length of an integer, which a float can still approximate. States of random generators need long ones."""
CHECKSUM = "checksum"
_NOT_INCLUDED = (CHECKSUM, "snapshot_dir")
_NOT_IN_DIGEST = ("snapshot_id", "created_at", "lineage", CHECKSUM)

_ID = re.compile(r"[A-Za-z0-9_@+=,-][A-Za-z0-9_@+=,.-]{0,199}")
_OF_EPISODE = re.compile(r"(.+)@([0-9]{1,18})")
_RESERVED = ("objects",)


def check_id(snapshot_id: str, where: str | Path | None = None) -> str:
    """Returns a valid snapshot id unchanged. Raises `SnapshotMetadataError` if it is not a safe, plain file name."""
    if is_id(snapshot_id):
        return snapshot_id
    raise SnapshotMetadataError(
        f"{f'{where}: ' if where else ''}expected the id of a snapshot to be a plain file name of at most 200 letters, "
        f"digits and any of _@+=,.- (not `objects`, and without a dot at the start), got {briefly(snapshot_id)}."
    )


def is_id(text: object) -> bool:
    """Returns whether `text` is a valid snapshot id."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None and text not in _RESERVED


def new_id() -> str:
    """Returns a new id. It starts with the time, so that ids sort by age, and ends with random digits."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def step_of(snapshot_id: str) -> tuple[str, int] | None:
    """Returns the episode id and the step in a snapshot id of the form `<episode_id>@<step>`; otherwise `None`."""
    found = _OF_EPISODE.fullmatch(snapshot_id)
    return (found[1], int(found[2])) if found else None


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
        raise SnapshotMetadataError(f"{path}: invalid JSON at {where}: {error.msg}.") from None
    except SnapshotMetadataError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, NaN, bytes that are not UTF-8, …
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SnapshotMetadataError(f"{path}: invalid JSON: {what}.") from None
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
        raise SnapshotMetadataError(f"{path}: the file has more than {MAX_FILE_BYTES:,} bytes.")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def check_json(data: Any, where: str) -> None:
    """Raises `SnapshotMetadataError` if `data` contains values that are not JSON, huge numbers, or deep nesting."""
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
    raise SnapshotMetadataError(f"{where}: the JSON has more than {MAX_DEPTH} levels of nesting{_in(level[0][0])}.")


def _in(name: str) -> str:
    return f" in `{briefly(name)[1:-1]}`" if name else ""


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return value.bit_length() <= MAX_INTEGER_BITS
    return value is None or isinstance(value, str)


def digest_of(content: Mapping[str, Any]) -> str:
    """Returns `sha256:…` of the canonical JSON text of `content`."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def with_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `data` with a checksum of its content."""
    return {**data, CHECKSUM: _checksum_of(data)}


def check_checksum(data: Mapping[str, Any], where: str) -> None:
    """Raises an error if the checksum in `data` is missing or malformed, or does not match the content."""
    found = data.get(CHECKSUM)
    if not isinstance(found, str) or not found.startswith("sha256:"):
        raise SnapshotMetadataError(f"{where}: expected `{CHECKSUM}` to be sha256:…, got {briefly(found)}.")
    if found != _checksum_of(data):
        raise SnapshotCorruptError(
            f"{where}: the content does not match the `{CHECKSUM}`, so the file was changed or damaged after it was "
            "written. Use another snapshot, or an undamaged copy of this one."
        )


def _checksum_of(data: Mapping[str, Any]) -> str:
    return digest_of({name: value for name, value in data.items() if name not in _NOT_INCLUDED})


def absolute(path: Any) -> Path:
    """Converts the value of `snapshot_dir` to a path. Raises `ValueError` if the value is not an absolute path."""
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
    step_type: Literal["FIRST", "MID"]
    reward: Number | None
    discount: Number | None


class _Container(TypedDict, total=False):
    options: Table
    workdir: Text | None
    env_names: list[Text]
    processes: list[Any]
    not_captured: list[Text]


class _Agent(TypedDict, total=False):
    factory: Text
    options: Table
    source_digest: Text | None
    state: Digest | None
    state_version: Count | None


class _PastStage(TypedDict):
    journal: list[Digest]


class _Episode(TypedDict, total=False):
    """The field `past_stages` of the `episode` table, which contains digests. `EpisodeFacts` validates other fields."""

    past_stages: list[_PastStage]


def _like(kind: Any) -> GetPydanticSchema:
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(kind))


TimeStepFields = Annotated[Mapping[str, Any], _like(_TimeStep)]
ContainerFields = Annotated[Mapping[str, Any], _like(_Container)]
AgentFields = Annotated[Mapping[str, Any], _like(_Agent)]
EpisodeFields = Annotated[Mapping[str, Any], _like(_Episode)]


@dataclass(frozen=True, slots=True)
class EnvironmentSnapshot:
    """A saved episode that waits for an action, with all data that another process needs to continue the episode.

    Files, journals and messages are stored as objects in the `ObjectStore` next to `snapshot_dir`. The fields contain
    the digests of the objects. Mappings and sequences contain only JSON values.

    Attributes:
        snapshot_id: Name of the snapshot in its store.
        created_at: Time of creation in UTC, in ISO 8601 format with the offset.
        snapshot_dir: Directory from which the snapshot was read: `<store>/<snapshot_id>`.
        step_count: Number of time steps since FIRST.
        step_limit: Number of steps after which the episode is truncated; `None` for no limit.
        task_type: Type of the task, always `"harbor"`.
        task_data: Result of `Task.describe()`.
        container_type: Container backend: `"docker"`, `"local"`, ….
        container_image: Origin of the container's files, such as the name of an image; `None` if unknown.
        container_dockerfile_path: Dockerfile of the task; `None` without a Dockerfile.
        container_resources: `cpus`, `memory_mb`, `storage_mb` and `gpus`; `None` means unlimited.
        time_step: `step_type` (`"FIRST"` or `"MID"`), `reward` and `discount` of the pending time step.
        message_objects: Digests of the lines that encode the pending request's messages; see `agent_messages`.
        journal: Digests of the lines that encode the agent's calls to its environment and their results.
        journal_entries: Number of lines in the journal.
        filesystem: Digests of the lines that encode the delta, the changes to the container's files.
        filesystem_base: Identity of the original files to which the delta applies.
        filesystem_entries: Number of paths in the delta.
        filesystem_bytes: Total size of the files in the delta, in bytes.
        container: `options`, `workdir`, `env_names`, and state that is not captured: `processes` and `not_captured`.
        agent: `factory`, `options`, `source_digest`, and optionally `state` (an object) and its `state_version`.
        episode: Tokens, cost, elapsed seconds, random generator states, and so on.
        lineage: Origin: `root`, `parent`, `step`, `branch`, …; may be empty.
        writer: Versions of the software that wrote the snapshot.
        requires_reset: Always false, because the next call is `step()`.
        schema: Schema version of the JSON.
    """

    snapshot_id: Text
    created_at: UtcTime
    snapshot_dir: Path
    step_count: Count
    step_limit: Count | None
    task_type: Text
    task_data: Table
    container_type: Text
    container_image: Text | None
    container_dockerfile_path: Text | None
    container_resources: Mapping[str, Number | None]
    time_step: TimeStepFields
    message_objects: tuple[Digest, ...]
    journal: tuple[Digest, ...]
    journal_entries: Count
    filesystem: tuple[Digest, ...]
    filesystem_base: Text
    filesystem_entries: Count
    filesystem_bytes: Count
    container: ContainerFields = field(default_factory=dict)
    agent: AgentFields = field(default_factory=dict)
    episode: EpisodeFields = field(default_factory=dict)
    lineage: Table = field(default_factory=dict)
    writer: Table = field(default_factory=dict)
    requires_reset: Literal[False] = False
    schema: tuple[int, int] = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of snapshot.json: all fields except `snapshot_dir`."""
        return with_checksum({name: getattr(self, name) for name in _KEYS})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str | Path, snapshot_dir: Path | None = None) -> Self:
        """Creates a snapshot from the result of `to_dict`. The data is untrusted and fully checked.

        Args:
            data: The JSON object.
            where: Name of the file in error messages.
            snapshot_dir: Directory of the snapshot in its store; `None` uses the directory in `data`.

        Raises:
            SnapshotVersionError: The schema version is not the current one.
            SnapshotMetadataError: A field is missing, has another type, or is out of its bounds.
            SnapshotCorruptError: The content does not match its checksum.
        """
        where = str(where)
        check_json(data, where)
        if (schema := data.get("schema")) not in (SCHEMA, list(SCHEMA)):
            raise SnapshotVersionError(
                f"{where}: expected `schema` {list(SCHEMA)}, got {briefly(schema)}. Use the version of ares_exp that "
                "wrote this snapshot."
            )
        if missing := [name for name in _KEYS if name not in data]:
            raise SnapshotMetadataError(f"{where}: `{missing[0]}` is missing.")
        try:
            directory = snapshot_dir or absolute(data.get("snapshot_dir"))
            checked = validated(cls, {**data, "snapshot_dir": directory})
        except ValueError as error:
            raise SnapshotMetadataError(f"{where}: {error}.") from None
        check_id(checked.snapshot_id, where)
        check_checksum(data, where)
        # Keeps the original mappings, because pydantic has converted numbers and dropped unknown fields in its copies.
        tables = {name: data[name] for name in _KEYS if isinstance(data[name], Mapping)}
        return replace(checked, **tables)

    def save_to_file(self, path: str | Path) -> None:
        """Writes the JSON atomically. A file outside of `snapshot_dir` also contains the path `snapshot_dir`.

        Args:
            path: A file, or a directory in which to write snapshot.json.

        Raises:
            SnapshotError: The file cannot be written.
        """
        path = _file_at(Path(path))
        directory = self.snapshot_dir.absolute()
        data = self.to_dict()
        if path.absolute() != directory / SNAPSHOT_FILE:
            data["snapshot_dir"] = str(directory)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as file:
                file.write(encode(data, path))
        except OSError as error:
            raise SnapshotError(f"Cannot write the snapshot to {path}: {error.strerror or error}.") from None

    @classmethod
    def load_from_file(cls, path: str | Path) -> Self:
        """Reads a snapshot.json, which is untrusted.

        Args:
            path: The file, or its directory.

        Raises:
            SnapshotNotFoundError: The file does not exist.
            SnapshotVersionError: The schema version is not the current one.
            SnapshotMetadataError: The file is malformed. The message names the line or the field.
            SnapshotCorruptError: The file was changed or damaged after it was written.
        """
        path = _file_at(Path(path))
        data = read_json_object(path)
        directory = path.absolute().parent
        in_store = directory.name == data.get("snapshot_id") and (directory.parent / OBJECTS).is_dir()
        elsewhere = not in_store and "snapshot_dir" in data
        return cls.from_dict(data, where=path, snapshot_dir=None if elsewhere else directory)

    @property
    def object_store(self) -> ObjectStore:
        """The store of the snapshot's objects."""
        return ObjectStore(self.snapshot_dir.parent)

    @property
    def agent_messages(self) -> list[dict[str, Any]]:
        """The messages of the pending request, oldest first. Every access reads the messages from the store.

        Raises:
            SnapshotCorruptError: The objects of the messages are missing or damaged.
        """
        lines = self.object_store.get_lines(self.message_objects, max_bytes=MAX_MESSAGES_BYTES)
        return decode_messages(lines, self.snapshot_dir / SNAPSHOT_FILE)

    @property
    def digest(self) -> str:
        """The sha256 of the canonical JSON without id, time and lineage. Equal snapshots have equal digests."""
        return digest_of({name: value for name, value in self.to_dict().items() if name not in _NOT_IN_DIGEST})

    @property
    def is_restorable(self) -> bool:
        """Whether an episode can continue from the snapshot. This requires the agent's journal or state."""
        return bool(self.journal) or self.agent.get("state") is not None

    @property
    def past_journals(self) -> list[list[str]]:
        """The journals of the finished stages of the task. Each journal is a list of digests, like `journal`."""
        return [stage["journal"] for stage in self.episode.get("past_stages", ())]

    def objects(self) -> tuple[str, ...]:
        """Returns the digests in the fields, without duplicates. The digests of file contents are in the delta."""
        state = self.agent.get("state")
        past = (digest for journal in self.past_journals for digest in journal)
        named = (*self.journal, *past, *self.message_objects, *self.filesystem, *([state] if state is not None else []))
        return tuple(dict.fromkeys(named))


_KEYS = tuple(item.name for item in fields(EnvironmentSnapshot) if item.name != "snapshot_dir")


def _file_at(path: Path) -> Path:
    try:
        if not path.is_dir():
            return path
        if (path / OBJECTS).is_dir() and not (path / SNAPSHOT_FILE).exists():
            raise SnapshotNotFoundError(
                f"Expected a snapshot at {path}, found a store of several snapshots. Name one of them. "
                f"`ares-exp snapshots list {path}` lists them."
            )
        return path / SNAPSHOT_FILE
    except OSError:
        return path  # opening it raises a clear error


def encode(data: Mapping[str, Any], path: Path) -> bytes:
    """Masks the secrets in `data`, adds the checksum of the result, and encodes it as the text of a snapshot.json.

    Raises:
        SnapshotError: The text exceeds `MAX_FILE_BYTES`, so it could not be read again.
    """
    written = json.loads(dump_json(data))
    text = f"{dump_json(with_checksum(written), indent=1)}\n".encode()
    if len(text) > MAX_FILE_BYTES:
        raise SnapshotError(
            f"Cannot write {path}: expected at most {MAX_FILE_BYTES:,} bytes of metadata, got {len(text):,}. "
            "Shorten the options of the agent and the texts of the task."
        )
    return text


def encode_messages(messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """Encodes messages as lines for `ObjectStore.put_lines`, and masks secrets in them."""
    return [dump_json(message).encode() for message in messages]


def decode_messages(lines: Iterable[bytes], where: str | Path) -> list[dict[str, Any]]:
    """Decodes the lines of `encode_messages`. Raises `SnapshotCorruptError` if a line is not a message."""
    messages = []
    for number, line in enumerate(lines):
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise TypeError(f"got {briefly(message)}")
            check_json(message, "the line")
        except (ValueError, TypeError, RecursionError) as error:  # check_json raises a ValueError
            raise SnapshotCorruptError(
                f"{where}: line {number} of `message_objects` is not a message: {error}."
            ) from None
        messages.append(message)
    return messages
