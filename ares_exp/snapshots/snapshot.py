"""`EnvironmentSnapshot`, the content of a file `snapshot.json`: the state of an environment during an episode.

The file may come from an untrusted source, so every field is checked when the file is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
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
from ares_exp.llms.wire import refuse_constant
from ares_exp.records.run_dir import atomic_file, dump_json, open_regular
from ares_exp.records.validation import Number, Table, Text, briefly, validated

SCHEMA = (1, 1)
"""Schema version of `snapshot.json`: the major and the minor number."""
SNAPSHOT_FILE = "snapshot.json"
OBJECTS = "objects"
MAX_MESSAGES_BYTES = 256 * 2**20
MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_INTEGER_BITS = 1000
"""Maximum length of an integer in bits: enough for the states of random generators, within the range of floats."""
CHECKSUM = "checksum"
_NOT_INCLUDED = (CHECKSUM, "snapshot_dir")
_NOT_IN_DIGEST = ("snapshot_id", "created_at", "lineage", CHECKSUM)

_ID = re.compile(r"[A-Za-z0-9_@+=,-][A-Za-z0-9_@+=,.-]{0,199}")
_OF_EPISODE = re.compile(r"(.+)@([0-9]{1,18})")


def check_id(snapshot_id: str, where: str | Path | None = None) -> str:
    """Returns `snapshot_id`. Raises `SnapshotMetadataError` if it is not a safe, plain file name."""
    if is_id(snapshot_id):
        return snapshot_id
    raise SnapshotMetadataError(
        f"{f'{where}: ' if where else ''}expected the id of a snapshot to be a plain file name of at most 200 letters, "
        f"digits and any of _@+=,.- (not `objects`, and without a dot at the start), got {briefly(snapshot_id)}."
    )


def is_id(text: object) -> bool:
    """Returns whether `text` is a valid snapshot id."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None and text != OBJECTS


def new_id() -> str:
    """Returns a new snapshot id. It starts with the time, so that ids sort by age, and ends with random digits."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def step_of(snapshot_id: str) -> tuple[str, int] | None:
    """Returns the episode id and the step of a snapshot id `<episode_id>@<step>`. Returns `None` for other ids."""
    found = _OF_EPISODE.fullmatch(snapshot_id)
    return (found[1], int(found[2])) if found else None


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a file that contains a JSON object. Rejects links, and files of more than `MAX_FILE_BYTES`.

    `EnvironmentSnapshot.from_dict` checks the content.

    Raises:
        SnapshotNotFoundError: The file does not exist.
        SnapshotMetadataError: The file is rejected, cannot be read, or does not contain a JSON object.
    """
    text = _read(path)
    try:
        data = json.loads(text, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise SnapshotMetadataError(f"{path}: invalid JSON at {where}: {error.msg}.") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, NaN, bytes that are not UTF-8, …
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SnapshotMetadataError(f"{path}: invalid JSON: {what}.") from None
    if not isinstance(data, dict):
        raise SnapshotMetadataError(f"{path}: expected a JSON object, got {briefly(data)}.")
    return data


def _read(path: Path) -> bytes:
    try:
        with open_regular(path, flags=os.O_NOFOLLOW) as file:
            text = file.read(MAX_FILE_BYTES + 1)
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


def check_json(data: Any, where: str) -> None:
    """Raises `SnapshotMetadataError` if `data` contains non-JSON values, huge numbers or deep nesting."""
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
    """Returns a digest `sha256:…` of `content`, computed from its JSON text with sorted keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def with_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `data` with an additional field `checksum`."""
    return {**data, CHECKSUM: _checksum_of(data)}


def check_checksum(data: Mapping[str, Any], where: str) -> None:
    """Checks the field `checksum` of `data`.

    Raises `SnapshotMetadataError` if it is missing or malformed, and `SnapshotCorruptError` if it does not match the
    content.
    """
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
    """Converts the value of the field `snapshot_dir` to a path. Raises `ValueError` if it is not an absolute path."""
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
"""The sha256 of an object's content, in hexadecimal digits. It is also the object's name."""
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
    """The part of the field `episode` that contains digests. `EpisodeFacts` validates the other parts."""

    past_stages: list[_PastStage]


def _like(kind: Any) -> GetPydanticSchema:
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(kind))


TimeStepFields = Annotated[Mapping[str, Any], _like(_TimeStep)]
ContainerFields = Annotated[Mapping[str, Any], _like(_Container)]
AgentFields = Annotated[Mapping[str, Any], _like(_Agent)]
EpisodeFields = Annotated[Mapping[str, Any], _like(_Episode)]


@dataclass(frozen=True, slots=True)
class EnvironmentSnapshot:
    """The state of an episode that waits for an action, with all data that another process needs to continue it.

    Large data (files, journals, messages) is stored as objects in the `ObjectStore` next to `snapshot_dir`. Fields
    contain only the digests of these objects. The values of mappings are JSON values.

    Attributes:
        snapshot_id: Name of the snapshot in its store.
        created_at: Time of creation in UTC, in ISO 8601 format with the offset.
        snapshot_dir: Directory from which the snapshot was read: `<store>/<snapshot_id>`.
        step_count: Number of time steps since FIRST, which is the number of applied actions.
        step_limit: Number of steps after which the episode is truncated; `None` for no limit.
        task_type: Type of the task, always `"harbor"`.
        task_data: Result of `Task.describe()`.
        container_type: Container backend: `"docker"`, `"local"`, ….
        container_image: Origin of the container's files, such as the name of an image; `None` if unknown.
        container_dockerfile_path: Dockerfile of the task; `None` without a Dockerfile.
        container_resources: `cpus`, `memory_mb`, `storage_mb` and `gpus`; `None` means unlimited.
        time_step: `step_type` (`"FIRST"` or `"MID"`), `reward` and `discount` of the time step whose action is still
            missing.
        message_objects: Digests of the objects with the messages of the request that waits for a response; see
            `agent_messages`.
        journal: Digests of the objects with the agent's journal, which records the agent's calls (such as commands) and
            their results.
        journal_entries: Number of lines in the journal.
        filesystem: Digests of the objects with the delta, which lists the changes to the container's files.
        filesystem_base: Identity of the files that the container started from, such as an image id.
        filesystem_entries: Number of paths in the delta.
        filesystem_bytes: Total size of the files in the delta, in bytes.
        container: `options`, `workdir` and `env_names`, and descriptions of what is not captured: `processes` and
            `not_captured`.
        agent: `factory`, `options`, `source_digest`, and optionally `state` (the digest of an object) and
            `state_version`.
        episode: Tokens, cost, elapsed seconds, random generator states, and so on.
        lineage: Origin of a branched episode: `root`, `parent`, `step`, `branch`, …; empty for other episodes.
        writer: Versions of the software that wrote the snapshot.
        requires_reset: Always false: the next call of a restored environment is `step()`, not `reset()`.
        schema: Schema version of the file.
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
        """Returns the content of `snapshot.json`: all fields except `snapshot_dir`, and a checksum."""
        return with_checksum({name: getattr(self, name) for name in _KEYS})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str | Path, snapshot_dir: Path | None = None) -> Self:
        """Creates a snapshot from a result of `to_dict`. The data may be untrusted, so all of it is checked.

        Args:
            data: The JSON object.
            where: Name of the file, for error messages.
            snapshot_dir: Directory of the snapshot in its store; by default the directory that `data` contains.

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
        """Writes the snapshot to a JSON file atomically. Its objects stay in the store of `snapshot_dir`.

        Args:
            path: Path of the file, or of a directory in which to write `snapshot.json`. A file outside of
                `snapshot_dir` also contains the path of `snapshot_dir`.

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
        """Reads a snapshot from its JSON file. The file may be untrusted, so all of it is checked.

        Args:
            path: Path of the file, or of a directory that contains `snapshot.json`.

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
        """The store that contains the objects of the snapshot."""
        return ObjectStore(self.snapshot_dir.parent)

    @property
    def agent_messages(self) -> list[dict[str, Any]]:
        """The messages of the request that waits for a response, oldest first. Each access reads them from the store.

        Raises:
            SnapshotCorruptError: The objects of the messages are missing or damaged.
        """
        lines = self.object_store.get_lines(self.message_objects, max_bytes=MAX_MESSAGES_BYTES)
        return decode_messages(lines, self.snapshot_dir / SNAPSHOT_FILE)

    @property
    def digest(self) -> str:
        """A sha256 of all fields except id, time and lineage. It shows whether two snapshots have equal content."""
        return digest_of({name: value for name, value in self.to_dict().items() if name not in _NOT_IN_DIGEST})

    @property
    def is_restorable(self) -> bool:
        """Whether an episode can continue from the snapshot, because it contains the agent's journal or state."""
        return bool(self.journal) or self.agent.get("state") is not None

    @property
    def past_journals(self) -> list[list[str]]:
        """The agent's journals of the task's finished stages. Each journal is a list of digests, like `journal`."""
        return [stage["journal"] for stage in self.episode.get("past_stages", ())]

    def objects(self) -> tuple[str, ...]:
        """Returns all distinct digests in the fields, but not the digests of file contents, which are in the delta."""
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
    """Returns the bytes of a `snapshot.json`, with masked secrets and a checksum.

    Raises `SnapshotError` if the file would exceed `MAX_FILE_BYTES`, because it could not be read again.
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
    """Encodes each message as one line for `ObjectStore.put_lines`, with masked secrets."""
    return [dump_json(message).encode() for message in messages]


def decode_messages(lines: Iterable[bytes], where: str | Path) -> list[dict[str, Any]]:
    """Decodes lines from `encode_messages`. Raises `SnapshotCorruptError` if a line does not contain a message."""
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
