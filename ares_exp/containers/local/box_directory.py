"""The directory that each local box has on the host: who owns it, and who sweeps up behind the dead."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ares_exp.containers.local.cgroup import RECORD, remove_groups
from ares_exp.containers.owned_directory import OwnedDirectory, name_prefix
from ares_exp.containers.ownership import owner_mark

PURPOSE = "box"
"""What the names say; the mark of the process that made it follows."""

_T = TypeVar("_T")
_IN_MEMORY = Path("/dev/shm")
_DELETE_SEC = 300.0

# An ordinary user may not enter what his box's root closed, and the kernel closes one directory of every overlay.
_REMOVE = """
remove() { rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; } 2>/dev/null; }
"""

# It outlives us: the end of its stdin is our end, however that came. Argument: how the paths of our directories begin.
# A group that still has processes keeps its directory, by which a later sweep finds it. No child of ours: nobody waits.
_HEIR = """
exec 3<&0
REMOVE
sweep() {
  for box in "$1/$2"* "$1/.$2"*; do
    [ -d "$box" ] || continue
    kept=
    [ -f "$box/RECORD" ] && while IFS= read -r group; do
      case $group in */"${box##*/}") [ ! -d "$group" ] || rmdir "$group" || kept=yes ;; esac
    done <"$box/RECORD"
    [ -n "$kept" ] || remove "$box"
    [ ! -d "$box" ] || left=yes
  done
}
inherit() {
  trap '' HUP INT QUIT TERM
  read -r _
  for pause in 0.1 0.2 0.5 1 2; do
    left=
    sweep "$@"
    [ -n "$left" ] || exit 0
    sleep "$pause"
  done
}
inherit "$@" <&3 3<&- &
""".replace("RECORD", RECORD).replace("REMOVE", _REMOVE)


def folders() -> list[Path]:
    """Where the directories of boxes may lie: in memory, and with the temporary files."""
    return list(dict.fromkeys(path for path in (_IN_MEMORY, Path(tempfile.gettempdir())) if path.is_dir()))


class BoxDirectory(OwnedDirectory):
    """The directory of one box, whose groups have its name."""

    def __init__(self, folder: Path) -> None:
        """Makes the directory, readable by us alone.

        Args:
            folder: One of `folders`.

        Raises:
            OSError: It cannot be made.
        """
        super().__init__(_prefix(os.getpid(), folder), folder)
        self._mutex = threading.Lock()

    def prepare(self, work: Callable[[Path], _T]) -> _T:
        """Does work in it, such as making groups, that must not outrun its removal. Blocking.

        Raises:
            OSError: It has been removed.
        """
        with self._mutex:
            if self._lock < 0:
                raise FileNotFoundError(f"{self.path} has been removed")
            return work(self.path)

    def remove(self) -> None:
        """Deletes it with all that is in it, and the cgroups of its box. Idempotent."""
        with self._mutex:
            super().remove()

    def _delete(self) -> None:
        delete(self.path)


@functools.lru_cache(maxsize=8)
def _prefix(pid: int, folder: Path) -> str:
    """How the names of this process's directories in `folder` begin. Starts what deletes them when we are killed."""
    prefix = f"{name_prefix(PURPOSE)}{owner_mark()}-{secrets.token_hex(4)}-"
    theirs, ours = os.pipe()  # ours stays open to our end, and no program that we run inherits it
    nothing = subprocess.DEVNULL
    try:
        subprocess.run(
            ["/bin/sh", "-c", _HEIR, "sh", folder, prefix],
            stdin=theirs,
            stdout=nothing,
            stderr=nothing,
            env={"PATH": os.defpath},
            cwd="/",
            start_new_session=True,
            timeout=10,
            check=True,
        )
    except BaseException as error:
        os.close(ours)
        if isinstance(error, subprocess.SubprocessError):
            raise OSError(f"the shell that cleans up behind a killed run did not start: {error}") from error
        raise
    finally:
        os.close(theirs)
    return prefix


def delete(path: Path) -> bool:
    """Deletes the directory of a box that has ended, and its cgroups. False: something in them would not die yet."""
    if not remove_groups(path):
        return False  # a later sweep finds them by it
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["/bin/sh", "-c", f'{_REMOVE}remove "$1"', "sh", path],
            stdin=subprocess.DEVNULL,
            env={"PATH": os.defpath},
            timeout=_DELETE_SEC,
            check=False,
        )
    return not path.exists()
