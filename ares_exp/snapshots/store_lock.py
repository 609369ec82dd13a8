"""Keeps the collection of garbage away from those who write: a lock that the kernel drops with its process."""

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
    """Held by those who put objects and commit; by any number of them at once, also within each other.

    On a file system without such locks nobody holds one, and nobody can collect.

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
    """Held by the collector alone. Gives whether it is: not if somebody writes."""
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
