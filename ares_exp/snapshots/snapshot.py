"""`EnvironmentSnapshot`: the content of snapshot.json, an environment mid-episode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

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
from ares_exp.snapshots.document import (
    CHECKSUM,
    MAX_FILE_BYTES,
    AgentFields,
    ContainerFields,
    Count,
    Digest,
    EpisodeFields,
    TimeStepFields,
    UtcTime,
    absolute,
    check_checksum,
    check_json,
    digest_of,
    read_json_object,
    with_checksum,
)
from ares_exp.snapshots.snapshot_id import check_id

SCHEMA = (1, 1)
"""The schema version of snapshot.json: major, minor."""
SNAPSHOT_FILE = "snapshot.json"
OBJECTS = "objects"
MAX_MESSAGES_BYTES = 256 * 2**20
_NOT_IN_DIGEST = ("snapshot_id", "created_at", "lineage", CHECKSUM)


@dataclass(frozen=True, slots=True)
class EnvironmentSnapshot:
    """An episode that is waiting for an action, with all the data needed to continue it in another process.

    Contents (files, the journal, messages) are objects in the `ObjectStore` next to `snapshot_dir`, named by their
    digests. Mappings and sequences are plain JSON.

    Attributes:
        snapshot_id: Name in its store.
        created_at: ISO 8601, UTC, with offset.
        snapshot_dir: Directory in its store from which it was read: `<store>/<snapshot_id>`.
        step_count: Number of time steps since FIRST.
        step_limit: Number of steps at which the episode is truncated, or `None`.
        task_type: `"harbor"`.
        task_data: Result of `Task.describe()`.
        container_type: Backend: `"docker"`, `"local"`, ….
        container_image: Source of the container's files, or `None`.
        container_dockerfile_path: Dockerfile of the task, or `None`.
        container_resources: `cpus`, `memory_mb`, `storage_mb`, `gpus`; `None` is unlimited.
        time_step: `step_type` (`"FIRST"` or `"MID"`), `reward` and `discount` of the pending time step.
        message_objects: Lines with the pending request's messages; see `agent_messages`.
        journal: Lines with the agent's calls to its environment and their results.
        journal_entries: Number of lines in the journal.
        filesystem: Lines with the delta of the container's files.
        filesystem_base: Base of the delta.
        filesystem_entries: Number of paths in the delta.
        filesystem_bytes: Total size of the files in the delta, bytes.
        container: `options`, `workdir`, `env_names`, and state that is not captured: `processes` and `not_captured`.
        agent: `factory`, `options`, `source_digest`, and optionally `state` (an object) and its `state_version`.
        episode: Tokens, cost, elapsed seconds, random generator states, and so on.
        lineage: Origin: `root`, `parent`, `step`, `branch`, …; may be empty.
        writer: Versions of the software that wrote the snapshot.
        requires_reset: Always false: the next call is `step()`.
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
            raise SnapshotMetadataError(f"{where}: expected `{missing[0]}`, but it is missing.")
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
            SnapshotMetadataError: The file is malformed. The message gives the line or the field.
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
        """The store of its objects."""
        return ObjectStore(self.snapshot_dir.parent)

    @property
    def agent_messages(self) -> list[dict[str, Any]]:
        """The messages of the pending request, oldest first. Every access reads them from the store.

        Raises:
            SnapshotCorruptError: The objects of the messages are missing or damaged.
        """
        lines = self.object_store.get_lines(self.message_objects, max_bytes=MAX_MESSAGES_BYTES)
        return decode_messages(lines, self.snapshot_dir / SNAPSHOT_FILE)

    @property
    def digest(self) -> str:
        """The sha256 of its canonical JSON without id, time and lineage. Equal snapshots have equal digests."""
        return digest_of({name: value for name, value in self.to_dict().items() if name not in _NOT_IN_DIGEST})

    @property
    def is_restorable(self) -> bool:
        """Whether an episode can continue from the snapshot, because it has the agent's journal or state."""
        return bool(self.journal) or self.agent.get("state") is not None

    @property
    def past_journals(self) -> list[list[str]]:
        """The journals of the finished stages of the task, each like `journal`."""
        return [stage["journal"] for stage in self.episode.get("past_stages", ())]

    def objects(self) -> tuple[str, ...]:
        """Returns the digests in the fields, without duplicates. Digests of the files' contents are in the delta."""
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
    """Returns the text of a snapshot.json with masked secrets, and with the checksum of the masked content.

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
    """Encodes messages as lines for `ObjectStore.put_lines`, with masked secrets."""
    return [dump_json(message).encode() for message in messages]


def decode_messages(lines: Iterable[bytes], where: str | Path) -> list[dict[str, Any]]:
    """Decodes the lines of `encode_messages`.

    Raises:
        SnapshotCorruptError: A line is not a message.
    """
    messages = []
    for number, line in enumerate(lines):
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise TypeError(f"got {briefly(message)}")
            check_json(message, "the line")
        except (ValueError, TypeError, RecursionError) as error:  # check_json raises a ValueError
            raise SnapshotCorruptError(
                f"{where}: expected a message in line {number} of `message_objects`, but: {error}."
            ) from None
        messages.append(message)
    return messages
