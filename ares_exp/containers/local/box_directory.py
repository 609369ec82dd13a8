"""The directory that each local box has on the host: who owns it, and who sweeps up behind the dead."""

from __future__ import annotations

import fcntl
import functools
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

from ares_exp.containers.local.cgroup import RECORD, remove_groups

PREFIX = "ares_exp-box-"
"""How the names begin; the number of the process that made it follows."""

# It outlives us: the end of its stdin is our end, however that came. Argument: how the paths of our directories begin.
# A group that still has processes keeps its directory, by which a later sweep finds it. No child of ours: nobody waits.
_HEIR = """
exec 3<&0
sweep() {
  for box in "$1/$2"* "$1/.$2"*; do
    [ -d "$box" ] || continue
    kept=
    [ -f "$box/RECORD" ] && while IFS= read -r group; do
      case $group in */"${box##*/}") [ ! -d "$group" ] || rmdir "$group" || kept=yes ;; esac
    done <"$box/RECORD"
    [ -n "$kept" ] || rm -rf "$box"
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
""".replace("RECORD", RECORD)


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
        folder = Path(tempfile.gettempdir())
        fresh = Path(tempfile.mkdtemp(prefix=f".{_prefix(os.getpid(), folder)}", dir=folder))
        self._lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = fresh.rename(fresh.with_name(fresh.name[1:]))  # only now does a sweep take it for stale: locked

    def remove(self) -> None:
        """Deletes it with all that is in it, and the cgroups of its box. Idempotent."""
        delete(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@functools.lru_cache(maxsize=8)
def _prefix(pid: int, folder: Path) -> str:
    """How the names of this process's directories in `folder` begin. Starts what deletes them when we are killed."""
    prefix = f"{PREFIX}{pid}-{secrets.token_hex(4)}-"
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
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()
