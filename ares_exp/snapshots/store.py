"""The snapshot store: a directory with snapshots, and with the objects that they share.

```
<path>/objects/ab/cdef…             an object, named by its digest (ares_exp.containers.filesystem.stored_objects)
<path>/<snapshot_id>/snapshot.json  a snapshot, which is written after all of its objects
<path>/.tmp-…                       a directory being written or removed, or a leftover of a killed process (see `gc`)
<path>/.lock                        the lock: shared for writers, exclusive for `gc`
```
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, MutableSequence, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from ares_exp.containers.filesystem.delta import Delta
from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.errors import SnapshotCorruptError, SnapshotError, SnapshotMetadataError, SnapshotNotFoundError
from ares_exp.records.run_dir import sync_to_disk, try_lock
from ares_exp.snapshots.snapshot import (
    OBJECTS,
    SNAPSHOT_FILE,
    EnvironmentSnapshot,
    check_id,
    decode_messages,
    encode,
    is_id,
    read_json_object,
    step_of,
)

GRACE_SEC = 3600.0
TEMPORARY = ".tmp-"
"""Name prefix of directories that are still being written, or being removed."""
LOCK_FILE = ".lock"
WRITER_WAITS_SEC = 120.0
"""Maximum number of seconds that a writer waits for a garbage collection, which normally takes less time."""
COLLECTOR_WAITS_SEC = 1.0
MAX_PROBLEMS = 20
_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `SnapshotStore.verify` for one snapshot.

    Attributes:
        objects: Number of objects that the snapshot needs, including the objects of its files.
        bytes: Total size of these objects on disk, including objects that other snapshots also need.
        problems: At most `MAX_PROBLEMS` problems, one sentence each. Empty if the snapshot is complete.
    """

    snapshot_id: str
    objects: int = 0
    bytes: int = 0
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the verification found no problem."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class RemovedObjects:
    """The result of `SnapshotStore.gc`: the removed objects or, in a dry run, the objects to remove.

    Attributes:
        objects: Number of objects.
        bytes: Total size of these objects on disk.
        directories: Number of temporary directories.
        skipped: Reason why nothing was removed, as a sentence; `None` if `gc` ran.
    """

    objects: int = 0
    bytes: int = 0
    directories: int = 0
    skipped: str | None = None


class SnapshotStore:
    """The snapshots in a directory. Several threads and processes may use the same directory. All methods block."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def objects(self) -> ObjectStore:
        """The store of the snapshots' objects. Put the objects of a new snapshot here, inside `writing()`.

        Always use this instance, because `commit(sync=True)` syncs only objects that were put through it.
        """
        return ObjectStore(self.path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Prevents garbage collection in the `with` block, in which you store a snapshot's objects and commit it.

        Creates the store if it is missing. Several writers may use this context at the same time.

        Raises:
            SnapshotError: The store is not writable, or a garbage collection did not end in time.
        """
        with ExitStack() as held:
            with _told(self.path, "write in"):
                self.path.mkdir(parents=True, exist_ok=True)
                is_held = held.enter_context(_lock(self.path, fcntl.LOCK_SH, WRITER_WAITS_SEC))
            if not is_held:
                raise SnapshotError(
                    f"Cannot write to {self.path}: it was locked for {WRITER_WAITS_SEC:g} s by a garbage collection, "
                    "such as `ares-exp snapshots gc`. Try again later."
                )
            yield

    def commit(self, snapshot: EnvironmentSnapshot, *, sync: bool = False) -> EnvironmentSnapshot:
        """Adds a snapshot to the store atomically. Its objects must already be in the store.

        Args:
            snapshot: Snapshot to add. Its `snapshot_dir` is ignored.
            sync: Whether the snapshot and its objects survive a power cut after this method has returned.

        Returns:
            The snapshot as it is in the store, with masked secrets and its new `snapshot_dir`.

        Raises:
            SnapshotError: The id already exists, an object is missing, or the snapshot cannot be written.
            SnapshotMetadataError: A field has an invalid value.
        """
        target = self._directory(snapshot.snapshot_id)
        temporary = self.path / f"{TEMPORARY}{secrets.token_hex(8)}"
        file = temporary / SNAPSHOT_FILE
        with self.writing(), _told(target, "write"):
            for digest in snapshot.objects():
                if not self.objects.keep(digest):
                    raise SnapshotError(
                        f"Cannot write {self.path / snapshot.snapshot_id}: its object {digest} is not in the store. "
                        "Store the objects and call `commit` in the same `with store.writing():` block."
                    )
            if sync:
                self.objects.sync()
            try:
                temporary.mkdir()
                file.write_bytes(encode(snapshot.to_dict(), target))
                committed = EnvironmentSnapshot.from_dict(read_json_object(file), where=target, snapshot_dir=target)
                if sync:
                    sync_to_disk(file)
                    sync_to_disk(temporary)
                try:
                    temporary.rename(target)
                except OSError:
                    if os.path.lexists(target):
                        raise SnapshotError(f"Cannot write the snapshot, because {target} already exists.") from None
                    raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            if sync:
                sync_to_disk(self.path)
        return committed

    def get(self, snapshot_id: str) -> EnvironmentSnapshot:
        """Reads a snapshot. Raises `SnapshotNotFoundError` if missing, and `SnapshotMetadataError` if unreadable."""
        directory = self._directory(snapshot_id)
        with _told(directory, "read"):
            if directory.is_symlink():
                raise SnapshotMetadataError(f"{directory}: expected a directory, got a link.")
            if not directory.is_dir():
                raise SnapshotNotFoundError(self.not_found(snapshot_id))
        file = directory / SNAPSHOT_FILE
        snapshot = EnvironmentSnapshot.from_dict(read_json_object(file), where=file, snapshot_dir=directory)
        if snapshot.snapshot_id != snapshot_id:
            raise SnapshotMetadataError(
                f"{file}: expected `snapshot_id` to be the name of its directory, got {snapshot.snapshot_id!r}."
            )
        return snapshot

    def nearest(self, episode_id: str, step: int) -> EnvironmentSnapshot | None:
        """Returns an episode's last snapshot at or before `step`. `None` if it does not exist or is not restorable.

        Raises:
            SnapshotError: The snapshot cannot be read.
        """
        found = [one for one in map(step_of, self.ids()) if one is not None]
        steps = [taken_at for of_episode, taken_at in found if of_episode == episode_id and taken_at <= step]
        nearest = self.get(f"{episode_id}@{max(steps)}") if steps else None
        return nearest if nearest is not None and nearest.is_restorable else None

    def not_found(self, wanted: str) -> str:
        """Returns an error message for a missing snapshot. It suggests similar ids of existing snapshots."""
        ids = [name for name in self.ids() if is_id(name)]
        close = difflib.get_close_matches(wanted, ids[:1000], n=3, cutoff=0.5) or ids[:3]
        there = (
            f"the store has other snapshots ({len(ids)}), such as {', '.join(close)}" if ids else "the store is empty"
        )
        return f"There is no snapshot {wanted} in {self.path}: {there}."

    def ids(self) -> Sequence[str]:
        """Returns the sorted ids of the snapshots, without reading them. Empty if the store does not exist.

        Raises `SnapshotError` if the directory of the store cannot be read.
        """
        with _told(self.path, "read"):
            try:
                with os.scandir(self.path) as entries:
                    names = [each.name for each in entries if each.is_dir()]
                    return sorted(name for name in names if not name.startswith(".") and name != OBJECTS)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def list(self, *, problems: MutableSequence[str] | None = None) -> Sequence[EnvironmentSnapshot]:
        """Reads all snapshots, oldest first. Leaves out unreadable snapshots, and adds their errors to `problems`."""
        found = []
        for name in self.ids():
            try:
                found.append(self.get(name))
            except SnapshotMetadataError as error:
                if problems is not None:
                    problems.append(str(error))
        return in_order(found)

    def delete(self, snapshot_id: str) -> None:
        """Removes a snapshot, even if it is damaged. Its objects remain until `gc` removes them.

        Raises:
            SnapshotNotFoundError: The store has no snapshot with this id.
            SnapshotError: The snapshot cannot be removed.
        """
        directory = self._directory(snapshot_id)
        removed = self.path / f"{TEMPORARY}{secrets.token_hex(8)}"
        if not os.path.lexists(directory):
            raise SnapshotNotFoundError(self.not_found(snapshot_id))
        with _told(directory, "remove"), self.writing():  # `gc` must not see a partly removed snapshot
            directory.rename(removed)
            _remove(removed)

    def beyond(self, episode_id: str, keep: int) -> Sequence[str]:
        """Returns the ids of an episode's snapshots, ordered by step, without the last `keep` snapshots."""
        steps = {name: found for name in self.ids() if (found := step_of(name)) is not None and found[0] == episode_id}
        return sorted(steps, key=lambda name: steps[name][1])[: max(0, len(steps) - keep)]

    def verify(self, snapshot_id: str, *, deep: bool = True) -> Verification:
        """Checks all objects that a snapshot needs. Problems are part of the result and are not raised.

        If `deep` is false, only checks that the objects with file contents exist, without reading them.
        """
        problems: list[str] = []
        needed: dict[str, int | None] = {}
        size = 0
        with _noted(problems):
            snapshot = self.get(snapshot_id)
            needed = dict.fromkeys(snapshot.objects())
            _check_lines(self.objects, snapshot, problems)
            with _noted(problems):
                needed |= _chunk_sizes(get_delta(self.objects, snapshot.filesystem), snapshot)
        for digest, expected in needed.items():
            with _noted(problems):
                size += self.objects.size(digest)
                if not deep or expected is None:
                    continue
                if (found := len(self.objects.get(digest, max_bytes=CHUNK_BYTES))) != expected:
                    raise SnapshotCorruptError(
                        f"Expected {self.objects.file(digest)} to contain {expected} bytes of a file, got {found}."
                    )
        return Verification(snapshot_id, len(needed), size, tuple(dict.fromkeys(problems))[:MAX_PROBLEMS])

    def gc(
        self, *, grace_sec: float = GRACE_SEC, dry_run: bool = False, without: Collection[str] = ()
    ) -> RemovedObjects:
        """Removes objects that no snapshot needs, and temporary directories of killed processes.

        Removes nothing while a snapshot is being written. If a snapshot cannot be read, also removes nothing and raises
        an error, because the snapshot may need any object.

        Args:
            grace_sec: Minimum age in seconds of the objects and directories to remove.
            dry_run: Whether to only count the objects and directories that would be removed.
            without: Ids of snapshots to treat as deleted, so that their objects count as unneeded.

        Raises:
            SnapshotError: A snapshot cannot be read, or an object cannot be removed.
        """
        if not self.path.is_dir():
            return RemovedObjects()
        with _told(self.path, "collect garbage in"), _lock(self.path, fcntl.LOCK_EX, COLLECTOR_WAITS_SEC) as alone:
            if not alone:
                return RemovedObjects(
                    skipped=f"Nothing was removed from {self.path}: a snapshot is being written. Try again later."
                )
            needed = self._needed(without)
            before = time.time() - grace_sec
            temporary = [path for path in self.path.glob(f"{TEMPORARY}*") if path.lstat().st_mtime <= before]
            if dry_run:
                found = [self.objects.file(digest).stat() for digest in self.objects.digests() if digest not in needed]
                sizes = [each.st_size for each in found if each.st_mtime <= before]
                return RemovedObjects(len(sizes), sum(sizes), len(temporary))
            for path in temporary:
                _remove(path)
            objects, size = self.objects.remove_unneeded(needed, older_than_sec=grace_sec)
            return RemovedObjects(objects, size, len(temporary))

    def _needed(self, without: Collection[str]) -> set[str]:
        """Returns the digests of all objects that the snapshots need, except for the snapshots in `without`.

        Every string in a journal, a delta or an agent's state that looks like a digest counts as needed, to be safe.
        """
        needed: set[str] = set()
        seen: set[str] = set()
        for name in self.ids():
            if name in without:
                continue
            try:
                snapshot = self.get(name)
                named = snapshot.objects()
                needed.update(named)
                for digest in set(named) - seen - set(snapshot.message_objects):
                    seen.add(digest)
                    needed.update(map(bytes.decode, _DIGEST.findall(self.objects.get(digest))))
            except SnapshotMetadataError as error:
                raise SnapshotError(
                    f"Nothing was removed from {self.path}, because a snapshot that cannot be read may need any "
                    f"object. Repair or remove {self.path / name}. {error}"
                ) from None
        return needed

    def _directory(self, snapshot_id: str) -> Path:
        return self.path / check_id(snapshot_id)


def in_order(snapshots: Iterable[EnvironmentSnapshot]) -> Sequence[EnvironmentSnapshot]:
    """Sorts snapshots by time of creation, then by step."""
    return sorted(snapshots, key=lambda each: (datetime.fromisoformat(each.created_at), each.step_count))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _told(path: Path, deed: str) -> Iterator[None]:
    """Replaces an `OSError` of the `with` block by a `SnapshotError`, with a message such as `Cannot {deed} {path}`."""
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"Cannot {deed} {error.filename or path}: {error.strerror or error}.") from None


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except SnapshotMetadataError as error:
        problems.append(str(error))


def _check_lines(objects: ObjectStore, snapshot: EnvironmentSnapshot, problems: list[str]) -> None:
    """Checks the journals, the messages and the agent's state of a snapshot. Adds the problems to `problems`."""
    with _noted(problems):
        lines = objects.get_lines(snapshot.journal)
        _expect(snapshot, "journal_entries", snapshot.journal_entries, len(lines))
        for journal in (*map(objects.get_lines, snapshot.past_journals), lines):
            for number, line in enumerate(journal):
                try:
                    json.loads(line)
                except (ValueError, RecursionError):
                    raise SnapshotCorruptError(f"Line {number} of the journal is not valid JSON.") from None
    with _noted(problems):
        decode_messages(objects.get_lines(snapshot.message_objects), "The snapshot")
    with _noted(problems):
        if (state := snapshot.agent.get("state")) is not None:
            objects.get(state)


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
        raise SnapshotCorruptError(f"{where}: `{name}` is {said!r}, but the stored data of the snapshot has {found!r}.")


@contextmanager
def _lock(store: Path, kind: int, wait_sec: float) -> Iterator[bool]:
    """Locks a store, shared for a writer or exclusively for `gc`. Yields whether this succeeded within `wait_sec`.

    A writer that holds the lock may acquire it again. If the file system does not support locks, writers run without a
    lock, and garbage collections fail.
    """
    path = store / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        try:
            is_held = try_lock(descriptor, kind, wait_sec=wait_sec)
        except OSError:
            if kind == fcntl.LOCK_EX:
                raise
            is_held = True
        yield is_held
    finally:
        os.close(descriptor)
