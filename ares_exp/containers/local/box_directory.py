"""The directory that each local box has on the host: who owns it, and who sweeps up behind the dead."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "ares_exp-box-"


class BoxDirectory:
    """A temporary directory of one box, locked for as long as the process that made it lives.

    The lock is the kernel's (`flock` on the directory): it ends with the process however that dies, and it holds
    across pid namespaces, where a process number would say nothing.
    """

    def __init__(self) -> None:
        """Makes the directory, readable by us alone.

        Raises:
            OSError: It cannot be made.
        """
        fresh = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-"))
        self._lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = fresh.rename(fresh.with_name(fresh.name[1:]))  # only now can a sweep see it: locked

    def remove(self) -> None:
        """Deletes it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_stale() -> list[Path]:
    """Deletes the box directories of this user whose processes are dead; returns their paths."""
    candidates = Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")
    return [path for path in candidates if _remove_if_stale(path)]


def _remove_if_stale(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
