"""The snapshot store: a directory of snapshots, and the objects that they share.

```
<path>/objects/ab/cdef…             contents, each once (ares_exp.containers.filesystem.stored_objects)
<path>/<snapshot_id>/snapshot.json  a snapshot, always complete: all of its objects are written before
<path>/.tmp-…                       a leftover of a killed process; `gc` removes it
<path>/.lock                        the lock: shared for writers, exclusive for `gc`
```
"""

from __future__ import annotations

import difflib
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, MutableSequence, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path

from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.errors import SnapshotError, SnapshotMetadataError, SnapshotNotFoundError
from ares_exp.records.run_dir import sync_to_disk
from ares_exp.snapshots import garbage
from ares_exp.snapshots import snapshot_checks as verification
from ares_exp.snapshots.document import read_json_object
from ares_exp.snapshots.snapshot import OBJECTS, SNAPSHOT_FILE, EnvironmentSnapshot, encode
from ares_exp.snapshots.snapshot_id import check_id, is_id, new_id, step_of


class SnapshotStore:
    """Snapshots in a directory. Safe for several threads and processes. Methods are blocking: call them in a thread."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def objects(self) -> ObjectStore:
        """The object store. Use this instance, inside `writing()`, to store the objects of a new snapshot.

        `commit(sync=True)` syncs only objects that were stored through this instance.
        """
        return ObjectStore(self.path)

    check_id = staticmethod(check_id)
    new_id = staticmethod(new_id)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Prevents garbage collection while the objects of a new snapshot are stored, until its `commit`.

        Creates the store if it is missing. Several writers may use this context at the same time, and `commit` may be
        called in it.

        Raises:
            SnapshotError: The store is not writable, or a garbage collection did not end in time.
        """
        with ExitStack() as held:
            with _told(self.path, "write in"):
                self.path.mkdir(parents=True, exist_ok=True)
                held.enter_context(garbage.shared_lock(self.path))
            yield

    def commit(self, snapshot: EnvironmentSnapshot, *, sync: bool = False) -> EnvironmentSnapshot:
        """Adds a snapshot whose objects are in the store, atomically.

        Args:
            snapshot: The snapshot. Its `snapshot_dir` is ignored.
            sync: Whether the snapshot and its objects must survive a power cut when this returns.

        Returns:
            The snapshot as it can be read from the store.

        Raises:
            SnapshotError: The id exists, an object is missing, or the snapshot cannot be written.
            SnapshotMetadataError: A field has a value that could not be read back.
        """
        target = self._directory(snapshot.snapshot_id)
        temporary = self.path / f"{garbage.TEMPORARY}{secrets.token_hex(8)}"
        file = temporary / SNAPSHOT_FILE
        with self.writing(), _told(target, "write"):
            for digest in snapshot.objects():
                if not self.objects.keep(digest):
                    raise SnapshotError(
                        f"Cannot write {self.path / snapshot.snapshot_id}: its object {digest} is not in the store. "
                        "Put objects inside `writing()`, and commit before it ends."
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
                        raise SnapshotError(f"Expected a new id, but {target} already exists.") from None
                    raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            if sync:
                sync_to_disk(self.path)
        return committed

    def get(self, snapshot_id: str) -> EnvironmentSnapshot:
        """Reads a snapshot.

        Raises:
            SnapshotNotFoundError: The store has no snapshot with this id.
            SnapshotMetadataError: The snapshot is malformed, or of another version; see
                `EnvironmentSnapshot.from_dict`.
        """
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
        """Returns the last snapshot of an episode at or before `step`; `None` if no episode can continue from it.

        Raises:
            SnapshotError: The snapshot cannot be read.
        """
        found = [one for one in map(step_of, self.ids()) if one is not None]
        steps = [taken_at for of_episode, taken_at in found if of_episode == episode_id and taken_at <= step]
        nearest = self.get(f"{episode_id}@{max(steps)}") if steps else None
        return nearest if nearest is not None and nearest.is_restorable else None

    def not_found(self, wanted: str) -> str:
        """Returns the error message for an unknown id. It lists existing ids."""
        ids = [name for name in self.ids() if is_id(name)]
        close = difflib.get_close_matches(wanted, ids[:1000], n=3, cutoff=0.5) or ids[:3]
        there = f"it has {len(ids)}, such as {', '.join(close)}" if ids else "there are none"
        return f"Expected a snapshot {wanted} in {self.path}: {there}."

    def ids(self) -> Sequence[str]:
        """Returns the sorted ids of the snapshots without opening them; empty if the store is missing.

        Raises:
            SnapshotError: The directory cannot be read.
        """
        with _told(self.path, "read"):
            try:
                with os.scandir(self.path) as entries:
                    names = [each.name for each in entries if each.is_dir()]
                    return sorted(name for name in names if not name.startswith(".") and name != OBJECTS)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def list(self, *, problems: MutableSequence[str] | None = None) -> Sequence[EnvironmentSnapshot]:
        """Reads the snapshots, oldest first. Unreadable snapshots are skipped and described in `problems`."""
        found = []
        for name in self.ids():
            try:
                found.append(self.get(name))
            except SnapshotMetadataError as error:
                if problems is not None:
                    problems.append(str(error))
        return in_order(found)

    def delete(self, snapshot_id: str) -> None:
        """Removes a snapshot, valid or damaged. Its objects remain until `gc`.

        Raises:
            SnapshotNotFoundError: The store has no snapshot with this id.
            SnapshotError: The snapshot cannot be removed.
        """
        directory = self._directory(snapshot_id)
        removed = self.path / f"{garbage.TEMPORARY}{secrets.token_hex(8)}"
        if not os.path.lexists(directory):
            raise SnapshotNotFoundError(self.not_found(snapshot_id))
        with _told(directory, "remove"), garbage.shared_lock(self.path):  # `gc` must not see a partly removed snapshot
            directory.rename(removed)
            if removed.is_symlink():
                removed.unlink()
            else:
                shutil.rmtree(removed)

    def beyond(self, episode_id: str, keep: int) -> Sequence[str]:
        """Returns the ids of an episode's snapshots except its last `keep`, ordered by step."""
        steps = {name: found for name in self.ids() if (found := step_of(name)) is not None and found[0] == episode_id}
        return sorted(steps, key=lambda name: steps[name][1])[: max(0, len(steps) - keep)]

    def verify(self, snapshot_id: str, *, deep: bool = True) -> verification.Verification:
        """Verifies all objects that a snapshot needs. Returns the problems instead of raising them."""
        try:
            return verification.verify(self.get(snapshot_id), deep=deep)
        except SnapshotMetadataError as error:
            return verification.Verification(snapshot_id, problems=(str(error),))

    def gc(
        self, *, grace_sec: float = garbage.GRACE_SEC, dry_run: bool = False, without: Collection[str] = ()
    ) -> garbage.RemovedObjects:
        """Removes unneeded objects and leftovers of killed processes; see `ares_exp.snapshots.garbage`."""
        with _told(self.path, "collect garbage in"):
            return garbage.collect(self, grace_sec=grace_sec, dry_run=dry_run, without=without)

    def _directory(self, snapshot_id: str) -> Path:
        return self.path / check_id(snapshot_id)


def in_order(snapshots: Iterable[EnvironmentSnapshot]) -> Sequence[EnvironmentSnapshot]:
    """Sorts snapshots, oldest first."""
    return sorted(snapshots, key=lambda each: (datetime.fromisoformat(each.created_at), each.step_count))


@contextmanager
def _told(path: Path, deed: str) -> Iterator[None]:
    """Turns an `OSError` into a `SnapshotError` that names the action and the path."""
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"Cannot {deed} {error.filename or path}: {error.strerror or error}.") from None
