"""The storage for the files that containers write, determined by a test, as kernels and folders differ.

First choice is a folder in memory that can hold the upper layers of overlays: the files count as memory of the
container, cost no disk, and can be read from outside, as snapshots need. Second is such a folder on disk. Otherwise the
files are in a tmpfs inside the container, which cannot be read from outside.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ares_exp.containers.local.bubblewrap import find_bwrap, is_privileged, user_namespace
from ares_exp.containers.local.container_directory import ContainerDirectory, folders
from ares_exp.containers.local.mount_table import filesystem_type
from ares_exp.errors import PreflightError

UNREADABLE = (
    "Its files are in a tmpfs that it alone sees, as no folder on this machine can hold the upper layer of an overlay: "
    "/dev/shm (with 1 GiB free, on a kernel of 6.6 or newer) or TMPDIR (on ext4, xfs or btrfs, say), neither of them "
    "mounted noexec. Set TMPDIR to such a folder, or use container=docker."
)
"""The reason why a container cannot be captured, and the remedy."""

_LEAST_BYTES = 1024**3
_PROBE_SEC = 10.0

# Replaces a directory of the lower layer, for which the upper layer needs extended attributes.
_REPLACE = 'rmdir "$1/below" && mkdir "$1/below"'


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage of containers' files.

    Attributes:
        folder: The parent of the containers' directories.
        in_memory: Whether their files are in memory.
        is_readable: Whether the files are in that directory, else in a tmpfs that only the container sees.
    """

    folder: Path
    in_memory: bool
    is_readable: bool


def find_storage() -> Storage:
    """Returns the storage for containers of this process. Blocking; tests it once, in some milliseconds."""
    return _find_storage(Path(tempfile.gettempdir()))


@functools.lru_cache(maxsize=8)
def _find_storage(temporary: Path) -> Storage:
    with contextlib.suppress(PreflightError):  # no bubblewrap: reported when a container is started
        for folder in folders():
            in_memory = filesystem_type(folder) == "tmpfs"
            if (in_memory or folder == temporary) and _is_roomy(folder) and _holds_upper_layers(folder):
                return Storage(folder, in_memory=in_memory, is_readable=True)
    return Storage(temporary, in_memory=True, is_readable=False)


def _is_roomy(folder: Path) -> bool:
    """Returns whether the folder has space for a container and is not mounted noexec."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize >= _LEAST_BYTES and not status.f_flag & os.ST_NOEXEC


def _holds_upper_layers(folder: Path) -> bool:
    """Tests whether the folder can hold upper layers, with an overlay in a directory there.

    Raises:
        PreflightError: There is no bubblewrap.
    """
    bwrap = find_bwrap()
    try:
        directory = ContainerDirectory(folder)
    except OSError:
        return False
    try:
        return directory.prepare(lambda path: _replaces_a_directory(bwrap, path))
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        directory.remove()


def _replaces_a_directory(bwrap: Path, directory: Path) -> bool:
    lower, upper, work, merged = (directory / name for name in ("lower", "upper", "work", "merged"))
    for path in (lower, lower / "below", upper, work, merged):
        path.mkdir()
    os.setxattr(upper, "user.ares_exp", b"y")  # most folders without support fail here
    namespace = user_namespace(privileged=is_privileged())
    words: list[str | Path] = [bwrap, *namespace, "--die-with-parent", "--ro-bind", "/", "/"]
    words += ["--overlay-src", lower, "--overlay", upper, work, merged, "--", "/bin/sh", "-c", _REPLACE, "sh", merged]
    subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.defpath},
        start_new_session=True,
        timeout=_PROBE_SEC,
        check=False,
    )
    return os.getxattr(upper / "below", "user.overlay.opaque") == b"y"
