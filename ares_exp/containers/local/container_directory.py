"""The directory on the host in which a local container stores its files, and its removal, even if the run dies.

When the run's process ends, the container's processes end and its mounts disappear. A small shell then removes the
directory. If this shell was also killed, the next run or `ares-exp clean` removes the directory. If another program has
removed it (for example, a cleaner of `/tmp`), the container's cgroups remain. Their names identify the owner.

Directories are created in `/dev/shm` if it supports upper layers of overlays. Their files then count as memory of the
container. The second choice is the folder for temporary files, if it supports upper layers. Otherwise, the files are in
a tmpfs inside the container. The host cannot read this tmpfs, so snapshots are not supported.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ares_exp.containers import ownership
from ares_exp.containers.local.cgroup import PROBE_PREFIX, RECORD, find_groups, remove_group, remove_groups
from ares_exp.containers.local.guardian import MADE, end_marked, remove_made
from ares_exp.containers.local.isolation import (
    filesystem_type,
    find_bwrap,
    is_privileged,
    run_detached,
    user_namespace,
)
from ares_exp.containers.ownership import (
    Leftover,
    OwnedDirectory,
    find_directories,
    find_short_lived,
    is_dead_mark,
    name_prefix,
    owner_mark,
)
from ares_exp.errors import PreflightError

PURPOSE = "box"
"""Word in the names of container directories. In a name, the result of `owner_mark()` follows."""

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_IN_MEMORY = Path("/dev/shm")
_DELETE_SEC = 300.0
_START_SEC = 10.0

# An ordinary user may not enter directories that a container's root closed, or that the kernel closes per overlay.
_REMOVE = """
remove() { rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; } 2>/dev/null; }
"""

# A shell that cleans up after this process, whose end in any way closes the shell's stdin. Arguments: the folder and
# the prefix of our directories. A directory is kept for a later clean-up if its groups still have processes, or if a
# guardian has not removed its paths yet. The shell is not our child, so we need not reap it.
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

_MARKED = re.compile(rf"(?:{name_prefix(PURPOSE)}|{PROBE_PREFIX})((\d+)-\d+-[0-9a-f]+)-.+")


def folders() -> list[Path]:
    """Returns the folders that may contain container directories: `/dev/shm`, and the folder for temporary files."""
    return list(dict.fromkeys(path for path in (_IN_MEMORY, Path(tempfile.gettempdir())) if path.is_dir()))


class ContainerDirectory(OwnedDirectory):
    """The directory of one container on the host. The container's cgroups have the same name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(_prefix(os.getpid(), folder), folder, functools.partial(delete, is_certain=True))
        self._mutex = threading.Lock()

    def prepare(self, work: Callable[[Path], _T]) -> _T:
        """Calls `work` with the directory's path. Raises `FileNotFoundError` after `remove`. Blocking."""
        with self._mutex:
            if self._lock < 0:
                raise FileNotFoundError(f"{self.path} has been removed")
            return work(self.path)

    def remove(self) -> None:
        """Deletes the directory with its contents, and the container's cgroups. Idempotent."""
        with self._mutex:
            super().remove()


@functools.lru_cache(maxsize=8)
def _prefix(pid: int, folder: Path) -> str:
    """Returns the name prefix of our directories in `folder`. Starts a shell that deletes them if this process dies."""
    prefix = f"{name_prefix(PURPOSE)}{owner_mark()}-{secrets.token_hex(4)}-"
    theirs, ours = os.pipe()  # ours stays open until we end; no child program inherits it
    try:
        run_detached(["/bin/sh", "-c", _HEIR, "sh", folder, prefix], _START_SEC, stdin=theirs).check_returncode()
    except BaseException as error:
        os.close(ours)
        if isinstance(error, subprocess.SubprocessError):
            raise OSError(f"the shell that cleans up after a killed run did not start: {error}") from error
        raise
    finally:
        os.close(theirs)
    return prefix


def delete(path: Path, *, is_certain: bool = False) -> bool:
    """Deletes an ended container's directory, its cgroups, and the paths that it created elsewhere on this machine.

    Returns whether all of them are gone. If not, a process is still alive, or a path could not be removed. `is_certain`
    has the same meaning as in `remove_made`.
    """
    if (path / MADE).exists():
        if not end_marked(path.name):
            return False
        for replaced in remove_made(path, is_certain=is_certain):
            _logger.warning(
                "%s is from a killed run, unless another program has replaced it. Remove it if you do not need it.",
                replaced,
            )
        if (path / MADE).exists():
            return False
    if not remove_groups(path):
        return False  # a later clean-up finds the groups through the directory
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        run_detached(["/bin/sh", "-c", f'{_REMOVE}remove "$1"', "sh", path], _DELETE_SEC)
    return not path.exists()


def remove_stale() -> None:
    """Removes leftovers of this user's dead runs from this machine. Blocking; never raises."""
    ownership.remove_stale([*find(), *find_short_lived()])


def find() -> Iterator[Leftover]:
    """Yields this user's container directories, including active ones, and cgroups of dead processes. Blocking."""
    yield from find_directories(PURPOSE, delete, folders())
    for group in find_groups():
        found = _MARKED.fullmatch(group.name)
        if found is None or any((folder / group.name).is_dir() for folder in folders()):
            continue
        with contextlib.suppress(OSError):
            if group.stat().st_uid == os.geteuid() and is_dead_mark(found[1]):
                yield Leftover(
                    kind="cgroup",
                    name=str(group),
                    whose=f"process {found[2]}",
                    is_stale=True,
                    created=None,
                    remove=lambda group=group: "" if remove_group(group) else "a process in it is still running",  # type: ignore[misc]
                )


UNREADABLE = (
    "Its changed files are in memory (a private tmpfs), because no folder on this machine can be the upper layer of an "
    "overlay. Possible folders are /dev/shm (1 GiB free, Linux 6.6 or newer) and TMPDIR (for example, on ext4, xfs or "
    "btrfs), mounted without noexec. Set TMPDIR to such a folder, or use container=docker."
)
"""Error text: why a container cannot be captured, with a suggested fix."""

_LEAST_BYTES = 1024**3
_PROBE_SEC = 10.0

# Replaces a directory of the lower layer, which requires extended attributes in the upper layer.
_REPLACE = 'rmdir "$1/below" && mkdir "$1/below"'


@dataclass(frozen=True, slots=True)
class Storage:
    """The place where containers store their files: the folder of their directories, and whether it is in memory.

    If `is_readable` is false, the files are in a tmpfs that only the container itself can read.
    """

    folder: Path
    in_memory: bool
    is_readable: bool


def find_storage() -> Storage:
    """Returns where this process's containers store their files. The first call takes milliseconds, for a test."""
    return _find_storage(Path(tempfile.gettempdir()))


@functools.lru_cache(maxsize=8)
def _find_storage(temporary: Path) -> Storage:
    with contextlib.suppress(PreflightError):  # no bubblewrap: reported when a container starts
        for folder in folders():
            in_memory = filesystem_type(folder) == "tmpfs"
            if (in_memory or folder == temporary) and _holds_upper_layers(folder):
                return Storage(folder, in_memory=in_memory, is_readable=True)
    return Storage(temporary, in_memory=True, is_readable=False)


def _holds_upper_layers(folder: Path) -> bool:
    """Returns whether a folder has enough space and supports upper layers. Mounts an overlay as a test."""
    bwrap = find_bwrap()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        status = os.statvfs(folder)
        if status.f_bavail * status.f_frsize < _LEAST_BYTES or status.f_flag & os.ST_NOEXEC:
            return False
        directory = ContainerDirectory(folder)
        try:
            return directory.prepare(lambda path: _replaces_a_directory(bwrap, path))
        finally:
            directory.remove()
    return False


def _replaces_a_directory(bwrap: Path, directory: Path) -> bool:
    lower, upper, work, merged = (directory / name for name in ("lower", "upper", "work", "merged"))
    for path in (lower, lower / "below", upper, work, merged):
        path.mkdir()
    os.setxattr(upper, "user.ares_exp", b"y")  # most folders without support for overlays fail here
    namespace = user_namespace(privileged=is_privileged())
    words: list[str | Path] = [bwrap, *namespace, "--die-with-parent", "--ro-bind", "/", "/"]
    words += ["--overlay-src", lower, "--overlay", upper, work, merged, "--", "/bin/sh", "-c", _REPLACE, "sh", merged]
    run_detached(words, _PROBE_SEC)
    return os.getxattr(upper / "below", "user.overlay.opaque") == b"y"
