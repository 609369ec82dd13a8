"""The directory of a local container on the host, its owner, and its removal after the owner's death.

A container's mounts are in its mount namespace and vanish with its last process, which ends with the runner. The
directories are removed then too, unless the remover was killed with the runner. A cgroup without directory remains if
another program removed the directory (a cleaner of `/tmp`, say); its name identifies it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ares_exp.containers import owned_directory
from ares_exp.containers.leftover import Leftover
from ares_exp.containers.local.cgroup import PROBE_PREFIX, RECORD, find_groups, remove_group, remove_groups
from ares_exp.containers.local.guardian import MADE, end_marked, remove_made
from ares_exp.containers.owned_directory import OwnedDirectory, name_prefix
from ares_exp.containers.ownership import is_dead_mark, owner_mark

PURPOSE = "box"
"""Part of the directory names; the owner mark follows."""

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_IN_MEMORY = Path("/dev/shm")
_DELETE_SEC = 300.0

# An ordinary user may not enter directories closed by his container's root, or one that the kernel closes per overlay.
_REMOVE = """
remove() { rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; } 2>/dev/null; }
"""

# It outlives us: its stdin ends when we end, in any way. Arguments: the folder and prefix of our directories.
# A group that still has processes keeps its directory, by which a later cleanup finds it; so do paths that a guardian
# has not removed yet. Not our child: never reaped.
_HEIR = (
    """
exec 3<&0
REMOVE
sweep() {
  for container in "$1/$2"* "$1/.$2"*; do
    [ -d "$container" ] || continue
    kept=
    [ -f "$container/RECORD" ] && while IFS= read -r group; do
      case $group in */"${container##*/}") [ ! -d "$group" ] || rmdir "$group" || kept=yes ;; esac
    done <"$container/RECORD"
    [ ! -f "$container/MADE" ] || kept=yes
    [ -n "$kept" ] || remove "$container"
    [ ! -d "$container" ] || left=yes
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
    .replace("MADE", MADE)
    .replace("REMOVE", _REMOVE)
)

_MARKED = re.compile(rf"(?:{owned_directory.name_prefix(PURPOSE)}|{PROBE_PREFIX})((\d+)-\d+-[0-9a-f]+)-.+")


def folders() -> list[Path]:
    """Returns the possible parents of container directories: in memory, and the directory of temporary files."""
    return list(dict.fromkeys(path for path in (_IN_MEMORY, Path(tempfile.gettempdir())) if path.is_dir()))


class ContainerDirectory(OwnedDirectory):
    """The directory of one container; the container's cgroups have its name."""

    def __init__(self, folder: Path) -> None:
        """Creates the directory, readable only by this user.

        Args:
            folder: One of `folders`.

        Raises:
            OSError: It cannot be created.
        """
        super().__init__(_prefix(os.getpid(), folder), folder)
        self._mutex = threading.Lock()

    def prepare(self, work: Callable[[Path], _T]) -> _T:
        """Runs work in it, such as making groups, that must not overlap with its removal. Blocking.

        Raises:
            OSError: It has been removed.
        """
        with self._mutex:
            if self._lock < 0:
                raise FileNotFoundError(f"{self.path} has been removed")
            return work(self.path)

    def remove(self) -> None:
        """Deletes it with its contents, and the cgroups of its container. Idempotent."""
        with self._mutex:
            super().remove()

    def _delete(self) -> None:
        delete(self.path, is_certain=True)


@functools.lru_cache(maxsize=8)
def _prefix(pid: int, folder: Path) -> str:
    """Returns the name prefix of our directories in `folder`; starts the shell that deletes them if we die."""
    prefix = f"{name_prefix(PURPOSE)}{owner_mark()}-{secrets.token_hex(4)}-"
    theirs, ours = os.pipe()  # ours stays open until we end, and no program that we run inherits it
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


def delete(path: Path, *, is_certain: bool = False) -> bool:
    """Deletes the directory of an ended container, its cgroups and what it made on this machine.

    Args:
        path: The directory.
        is_certain: Whether the container has just ended; see `remove_made`.

    Returns:
        Whether all are gone. `False`: a process is still alive, or a path could not be removed.
    """
    if (path / MADE).exists():
        if not end_marked(path.name):
            return False
        for replaced in remove_made(path, is_certain=is_certain):
            _logger.warning(
                "%s was used by a run that was killed, and may have been replaced since. Remove it if it is not yours.",
                replaced,
            )
        if (path / MADE).exists():
            return False
    if not remove_groups(path):
        return False  # a later cleanup finds them by it
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["/bin/sh", "-c", f'{_REMOVE}remove "$1"', "sh", path],
            stdin=subprocess.DEVNULL,
            env={"PATH": os.defpath},
            timeout=_DELETE_SEC,
            check=False,
        )
    return not path.exists()


def remove_stale() -> None:
    """Removes leftovers of dead runs of this user. Blocking; never raises."""
    for leftover in (*find(), *owned_directory.find_short_lived()):
        if leftover.is_stale and (problem := leftover.remove()):
            what = (leftover.kind, leftover.name, leftover.whose)
            _logger.warning("The %s %s of %s, which is dead, stays: %s.", *what, problem)


def find() -> Iterator[Leftover]:
    """Yields the container directories of this user, those of running runs included, and orphaned groups. Blocking."""
    yield from owned_directory.find(PURPOSE, "directory", delete, folders())
    for group in find_groups():
        found = _MARKED.fullmatch(group.name)
        has_directory = any((folder / group.name).is_dir() for folder in folders())
        if found is not None and not has_directory and _is_ours(group) and is_dead_mark(found[1]):
            remove = functools.partial(_remove, group)
            yield Leftover("cgroup", str(group), f"process {found[2]}", is_stale=True, created=None, remove=remove)


def _is_ours(group: Path) -> bool:
    try:
        return group.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _remove(group: Path) -> str:
    return "" if remove_group(group) else "a process in it is still running"
