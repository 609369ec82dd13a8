"""The kernel's mount table, as one process sees it. Source of the format: `man proc_pid_mountinfo`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the table.

    Attributes:
        point: The mount point. A later mount hides an earlier one at the same path.
        root: The mounted directory of the file system.
        kind: The type of the file system: `tmpfs`, `ext4`, …
        options: Of the file system itself.
    """

    point: Path
    root: str
    kind: str
    options: tuple[str, ...]


def mounts(process: Path = Path("/proc/self")) -> Iterator[Mount]:
    """Yields the mounts that a process sees, in order.

    Args:
        process: The process's directory in `/proc`.

    Raises:
        OSError: It cannot be read.
    """
    for line in os.fsdecode((process / "mountinfo").read_bytes()).rstrip("\n").split("\n"):
        mount, filesystem = (part.split(" ") for part in line.split(" - ", 1))
        yield Mount(
            Path(_unescaped(mount[4])),
            _unescaped(mount[3]),
            filesystem[0],
            tuple(map(_unescaped, filesystem[-1].split(","))),
        )


def filesystem_type(path: Path) -> str:
    """Returns the type of the file system that holds `path`, links resolved."""
    kinds = {mount.point: mount.kind for mount in mounts()}
    resolved = path.resolve()
    return next((kinds[one] for one in (resolved, *resolved.parents) if one in kinds), "")


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
