"""Verification that all data of a snapshot exists in its store and is undamaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ares_exp.containers.filesystem.delta import Delta
from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES
from ares_exp.errors import SnapshotCorruptError, SnapshotMetadataError
from ares_exp.snapshots.snapshot import SNAPSHOT_FILE, EnvironmentSnapshot, decode_messages

MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification.

    Attributes:
        snapshot_id: Id of the snapshot.
        objects: Number of objects that it needs, including the objects of its files.
        bytes: Size of these objects on the disk, including objects shared with other snapshots.
        problems: The first `MAX_PROBLEMS` problems, one sentence each. Empty if the snapshot is complete.
    """

    snapshot_id: str
    objects: int = 0
    bytes: int = 0
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the verification found no problem."""
        return not self.problems


def verify(snapshot: EnvironmentSnapshot, *, deep: bool = True) -> Verification:
    """Verifies all objects that a snapshot needs.

    Args:
        snapshot: A snapshot that was read from its store.
        deep: Whether to also read the contents of files; otherwise only their existence is checked.
    """
    objects = snapshot.object_store
    problems: list[str] = []
    chunks: dict[str, int] = {}
    with _noted(problems):
        lines = objects.get_lines(snapshot.journal)
        _expect(snapshot, "journal_entries", snapshot.journal_entries, len(lines))
        for past in snapshot.past_journals:
            _check_lines(objects.get_lines(past))
        _check_lines(lines)
    with _noted(problems):
        decode_messages(objects.get_lines(snapshot.message_objects), "The snapshot")
    with _noted(problems):
        if (state := snapshot.agent.get("state")) is not None:
            objects.get(state)
    with _noted(problems):
        chunks = _chunk_sizes(get_delta(objects, snapshot.filesystem), snapshot)
    size = 0
    for digest in dict.fromkeys((*snapshot.objects(), *chunks)):
        with _noted(problems):
            size += objects.size(digest)
            if deep and digest in chunks:
                found = len(objects.get(digest, max_bytes=CHUNK_BYTES))
                if found != chunks[digest]:
                    raise SnapshotCorruptError(
                        f"Expected {objects.file(digest)} to contain {chunks[digest]} bytes of a file, got {found}."
                    )
    count = len({*snapshot.objects(), *chunks})
    return Verification(snapshot.snapshot_id, count, size, tuple(dict.fromkeys(problems))[:MAX_PROBLEMS])


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except SnapshotMetadataError as error:
        problems.append(str(error))


def _check_lines(lines: list[bytes]) -> None:
    for number, line in enumerate(lines):
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            raise SnapshotCorruptError(f"Expected JSON in line {number} of the journal, got something else.") from None


def _chunk_sizes(delta: Delta, snapshot: EnvironmentSnapshot) -> dict[str, int]:
    _expect(snapshot, "filesystem_base", snapshot.filesystem_base, delta.base)
    _expect(snapshot, "filesystem_entries", snapshot.filesystem_entries, len(delta.entries))
    _expect(snapshot, "filesystem_bytes", snapshot.filesystem_bytes, sum(each.size for each in delta.entries.values()))
    return {
        chunk: min(CHUNK_BYTES, entry.size - position * CHUNK_BYTES)
        for entry in delta.entries.values()
        for position, chunk in enumerate(entry.chunks)
        if chunk is not None
    }


def _expect(snapshot: EnvironmentSnapshot, name: str, said: object, found: object) -> None:
    if said != found:
        where = snapshot.snapshot_dir / SNAPSHOT_FILE
        raise SnapshotCorruptError(f"{where}: `{name}` is {said!r}, but the objects have {found!r}.")
