"""Garbage collection of a snapshot store: unneeded objects, and leftovers of killed processes."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ares_exp.errors import SnapshotError, SnapshotMetadataError

if TYPE_CHECKING:
    from ares_exp.snapshots.store import SnapshotStore


import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GRACE_SEC = 3600.0
TEMPORARY = ".tmp-"
"""Prefix of the names of directories that are being written or removed."""
_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True, slots=True)
class RemovedObjects:
    """The removed objects and directories or, in a dry run, the removable ones.

    Attributes:
        objects: Number of objects.
        bytes: Size of the objects on the disk.
        directories: Number of temporary directories.
        skipped: Reason why the collection was skipped, as a sentence; `None` if it ran.
    """

    objects: int = 0
    bytes: int = 0
    directories: int = 0
    skipped: str | None = None


def collect(
    store: SnapshotStore, *, grace_sec: float = GRACE_SEC, dry_run: bool = False, without: Collection[str] = ()
) -> RemovedObjects:
    """Removes unneeded objects and temporary directories that are older than the grace time.

    Nothing is removed while another process writes to the store, or if a snapshot cannot be read, because the objects
    that it needs are unknown.

    Args:
        store: The store.
        grace_sec: Age in seconds below which objects and directories are kept.
        dry_run: Whether to remove nothing.
        without: Ids of snapshots that are treated as removed.

    Raises:
        SnapshotError: A snapshot cannot be read.
    """
    if not store.path.is_dir():
        return RemovedObjects()
    with exclusive_lock(store.path) as alone:
        if not alone:
            return RemovedObjects(
                skipped=f"Nothing was removed from {store.path}: a snapshot is being written. Try again later."
            )
        needed = _needed(store, without)
        directories = _remove_temporary(store, grace_sec, dry_run=dry_run)
        if dry_run:
            before = time.time() - grace_sec
            found = [store.objects.file(digest).stat() for digest in store.objects.digests() if digest not in needed]
            sizes = [each.st_size for each in found if each.st_mtime <= before]
            objects, size = len(sizes), sum(sizes)
        else:
            objects, size = store.objects.remove_unneeded(needed, older_than_sec=grace_sec)
        return RemovedObjects(objects, size, directories)


def _needed(store: SnapshotStore, without: Collection[str]) -> set[str]:
    """Returns the digests of the objects that the snapshots need.

    Any string in the journal, the delta or the agent's state that has the form of a digest is treated as needed.
    """
    needed: set[str] = set()
    seen: set[str] = set()
    for name in store.ids():
        if name in without:
            continue
        try:
            snapshot = store.get(name)
            named = snapshot.objects()
            needed.update(named)
            for digest in set(named) - seen - set(snapshot.message_objects):
                seen.add(digest)
                needed.update(map(bytes.decode, _DIGEST.findall(store.objects.get(digest))))
        except SnapshotMetadataError as error:
            raise SnapshotError(
                f"Nothing was removed from {store.path}, because one snapshot cannot be read, and may need any "
                f"object. Repair or remove {store.path / name}. {error}"
            ) from None
    return needed


def _remove_temporary(store: SnapshotStore, grace_sec: float, *, dry_run: bool) -> int:
    before = time.time() - grace_sec
    found = [path for path in store.path.glob(f"{TEMPORARY}*") if path.lstat().st_mtime <= before]
    for path in [] if dry_run else found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return len(found)


LOCK_FILE = ".lock"
WRITER_WAITS_SEC = 120.0
"""Time in seconds that a writer waits for a garbage collection to end. A collection takes less time."""
COLLECTOR_WAITS_SEC = 1.0
_PAUSE_SEC = 0.005


@contextmanager
def shared_lock(store: Path) -> Iterator[None]:
    """Holds the writers' lock of a store. Any number of writers can hold it at the same time, also nested.

    If the file system has no such locks, no lock is held and no collection is allowed.

    Raises:
        SnapshotError: A garbage collection did not end in time.
    """
    with _held(store, fcntl.LOCK_SH, WRITER_WAITS_SEC) as held:
        if not held:
            raise SnapshotError(
                f"Cannot write to {store}: it has been locked by a garbage collection for {WRITER_WAITS_SEC:g} s."
            )
        yield


@contextmanager
def exclusive_lock(store: Path) -> Iterator[bool]:
    """Tries to lock a store for garbage collection. Yields whether that succeeded: it fails while a process writes."""
    with _held(store, fcntl.LOCK_EX, COLLECTOR_WAITS_SEC) as held:
        yield held


@contextmanager
def _held(store: Path, kind: int, wait_sec: float) -> Iterator[bool]:
    path = store / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        yield _lock(descriptor, kind, wait_sec)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int, wait_sec: float) -> bool:
    give_up = time.monotonic() + wait_sec
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:  # another process holds the lock; other errors do not end by waiting
            if time.monotonic() > give_up:
                return False
            time.sleep(_PAUSE_SEC)
        except OSError:
            if kind == fcntl.LOCK_EX:
                raise
            return True
        else:
            return True
