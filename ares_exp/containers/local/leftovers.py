"""What local boxes left on this machine: their directories, which name their cgroups.

There is nothing else. The mounts of a box are in a mount namespace of its own and go with its last process, which goes
when its runner does. Also the directories go then (`box_directory`), unless whatever killed the runner killed what it
had left in charge of that too.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ares_exp.containers.leftover import Leftover
from ares_exp.containers.local.box_directory import PREFIX, delete

_UNLOCKED_SEC = 60.0  # far longer than a new directory is without its lock
_logger = logging.getLogger(__name__)


def remove_stale() -> None:
    """Removes what dead runs of this user left. Blocking; never raises."""
    for leftover in find():
        if leftover.is_stale and (problem := leftover.remove()):
            _logger.warning("The directory %s of %s, which is dead, stays: %s.", leftover.name, leftover.whose, problem)


def find() -> Iterator[Leftover]:
    """The directories of all boxes of this user, the living included. Blocking."""
    folder = Path(tempfile.gettempdir())
    for path in sorted([*folder.glob(f"{PREFIX}*"), *folder.glob(f".{PREFIX}*")]):
        try:
            status = path.lstat()
        except OSError:
            continue
        if status.st_uid != os.geteuid():
            continue
        pid = re.match(r"\d+", path.name.partition(PREFIX)[2])
        yield Leftover(
            kind="box directory",
            name=str(path),
            whose=f"process {pid[0] if pid else 'unknown'}",
            is_stale=_when_stale(path),
            created=status.st_mtime,
            remove=lambda path=path: _remove(path),  # type: ignore[misc]
        )


def _when_stale(path: Path, *, remove: bool = False) -> bool:
    """Whether the process that made it is dead; removes it then, while nobody else can, if asked to."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        is_fresh = path.name.startswith(".") and time.time() - os.fstat(descriptor).st_mtime < _UNLOCKED_SEC
        if is_fresh or os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return not remove or delete(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _remove(path: Path) -> str:
    return "" if _when_stale(path, remove=True) or not path.exists() else "something in it is still in use"
