"""The lock between writers of a snapshot store and its garbage collection; the kernel drops it with its process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ares_exp.errors import SnapshotError

LOCK_FILE = ".lock"
WRITER_WAITS_SEC = 120.0
"""Longer than a collection takes."""
COLLECTOR_WAITS_SEC = 1.0
_PAUSE_SEC = 0.005


@contextmanager
def shared(store: Path) -> Iterator[None]:
    """Holds the lock of writers: any number of them at once, also within each other.

    A file system without such locks has no holders, and allows no collection.

    Raises:
        SnapshotError: Garbage is being collected, and that did not end in time.
    """
    with _held(store, fcntl.LOCK_SH, WRITER_WAITS_SEC) as held:
        if not held:
            raise SnapshotError(
                f"Cannot write in {store}: garbage is being collected in it for {WRITER_WAITS_SEC:g} s."
            )
        yield


@contextmanager
def exclusive(store: Path) -> Iterator[bool]:
    """Holds the lock of the garbage collector; yields whether it was free of writers."""
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
        except BlockingIOError:  # the only error that waiting can help against
            if time.monotonic() > give_up:
                return False
            time.sleep(_PAUSE_SEC)
        except OSError:
            if kind == fcntl.LOCK_EX:
                raise
            return True
        else:
            return True
