"""A shared lock of living writers, which the kernel drops with them: it tells their files from those of dead ones."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

ASKING_LIMIT_SEC = 1.0
"""How long a writer waits for those who ask whether there is one; then it writes without the lock."""


class WriterLock:
    """Held on a file or directory while something is being written there, by any number of writers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[str] = set()
        self._descriptor: int | None = None

    def acquire(self, path: Path, holder: str) -> None:
        """Holds the lock on `path` until every holder has released it. Raises `OSError` where there is no such path."""
        with self._lock:
            if self._descriptor is None:
                descriptor = os.open(path, os.O_RDONLY)
                _share(descriptor)
                self._descriptor = descriptor
            self._holders.add(holder)

    def release(self, holder: str) -> None:
        """Lets go, if this was the last holder. Of one that never got it this does nothing."""
        with self._lock:
            self._holders.discard(holder)
            if not self._holders and self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def _share(descriptor: int) -> None:
    give_up = time.monotonic() + ASKING_LIMIT_SEC
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody asks at this moment whether there is a writer, which takes microseconds
            if time.monotonic() > give_up:
                return
            time.sleep(0.0005)
        except OSError:  # a file system without such locks: `has_writer` will not take anybody for dead there
            return
        else:
            return


def has_writer(path: Path) -> bool:
    """Returns whether a living process writes at `path`. Raises `OSError` where there is no such path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if not _is_held(descriptor):
            return False
        time.sleep(0.005)  # somebody else may have been asking
        return _is_held(descriptor)
    finally:
        os.close(descriptor)


def _is_held(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
