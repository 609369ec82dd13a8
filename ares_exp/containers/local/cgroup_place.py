"""Where this process may make cgroups for its boxes, tried out; both versions of the interface are spoken.

Below the group that this process is in, so that a limit set around the run holds for its boxes too. Where version 2
forbids that (a group with processes in it has no limited groups below it), beside it, where systemd's delegation has
its place for them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ares_exp.containers.local.mount_table import mounts
from ares_exp.containers.ownership import owner_mark

Controller = Literal["cpu", "memory", "pids"]

PROBE_PREFIX = "ares_exp-probe-"
"""How the names of groups begin that are made to try a place out; the mark of the process follows."""

_OURS = "ares_exp-"
_UNIFIED = "unified"
_LIMIT_FILES = {
    True: {"cpu": "cpu.max", "memory": "memory.max", "pids": "pids.max"},
    False: {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes", "pids": "pids.max"},
}
_PROBE_SEC = 10.0
_SEARCH_SEC = 5.0

# A process of its own makes the group, enters it and removes it, also when we are killed meanwhile.
_PROBE = """
mkdir "$1" || exit
(echo 0 >"$1/cgroup.procs" && [ -w "$1/$2" ])
works=$?
rmdir "$1"
exit $works
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A group in which we may make those of boxes.

    Attributes:
        directory: Its directory.
        unified: Whether it speaks version 2.
    """

    directory: Path
    unified: bool


@functools.cache
def usable_places() -> Mapping[Controller, Place]:
    """For each controller the group in which this process can make groups. Tried once, some milliseconds.

    What a controller limits that is not among them is not limited here.
    """
    found = {controller: find_place(controller) for controller in get_args(Controller)}
    return {controller: place for controller, place in found.items() if place is not None}


def find_place(controller: Controller, process: Path = Path("/proc/self")) -> Place | None:
    """The nearest group in which groups with `controller` work, seen from the group of a process.

    Args:
        controller: What they have to limit.
        process: The process's directory in `/proc`.
    """
    with contextlib.suppress(OSError):  # a group that is going, a mount that is not what it seems
        return next((place for place in candidates(controller, process) if _works(place, controller)), None)
    return None


def candidates(controller: Controller, process: Path = Path("/proc/self")) -> Iterator[Place]:
    """The groups that may do, nearest first; as `find_place`. What others manage is left as it is."""
    groups = _groups_of(process)
    if controller in groups:
        yield Place(groups[controller][0], unified=False)
    elif _UNIFIED in groups:
        group, top = groups[_UNIFIED]
        with contextlib.suppress(OSError):  # refused in a group with processes: in every one but the very first
            (group / "cgroup.subtree_control").write_text(f"+{controller}")
        while True:
            if controller in (group / "cgroup.subtree_control").read_text().split():
                yield Place(group, unified=True)
            if group == top or _is_limited(group):
                return  # beside it, a box would escape the limits that are set around us
            group = group.parent


def find_groups(process: Path = Path("/proc/self")) -> Iterator[Path]:
    """All groups in sight that are named like ours, whoever made them. Blocking, for `_SEARCH_SEC` at most.

    Args:
        process: As `find_place`.
    """
    if not (process / "cgroup").exists():  # a kernel without them
        return
    deadline = time.monotonic() + _SEARCH_SEC
    for mount in sorted(
        {point for name, _, point in _hierarchies(process) if name in {*get_args(Controller), _UNIFIED}}
    ):
        for group, below, _ in os.walk(mount):
            yield from (Path(group, name) for name in below if name.startswith(_OURS))
            if time.monotonic() > deadline:
                return


def _groups_of(process: Path) -> dict[str, tuple[Path, Path]]:
    """For each version-1 controller, and `unified`: the process's group, and where that hierarchy is mounted."""
    if not (process / "cgroup").exists():  # a kernel without them
        return {}
    paths = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys((controllers or _UNIFIED).split(","), path))
    found: dict[str, tuple[Path, Path]] = {}
    for name, root, point in _hierarchies(process):
        if name in paths:
            inside = os.path.relpath(paths[name], root)
            if inside.split("/")[0] != "..":  # else our group is not among what is mounted here
                found.setdefault(name, (point / inside, point))
    return found


def _hierarchies(process: Path) -> Iterator[tuple[str, str, Path]]:
    """For each version-1 controller, and `unified`: which group of that hierarchy is mounted where."""
    for mount in mounts(process):
        for name in {"cgroup": mount.options, "cgroup2": (_UNIFIED,)}.get(mount.kind, ()):
            yield name, mount.root, mount.point


def _is_limited(group: Path) -> bool:
    limits = [group / name for name in ("cpu.max", "memory.max", "memory.high")]
    return any(not limit.read_text().startswith("max") for limit in limits if limit.exists())


def _works(place: Place, controller: Controller) -> bool:
    group = place.directory / f"{PROBE_PREFIX}{owner_mark()}-{secrets.token_hex(4)}"
    limit = _LIMIT_FILES[place.unified][controller]
    nothing = subprocess.DEVNULL
    try:
        probe = subprocess.run(
            ["/bin/sh", "-c", _PROBE, "sh", group, limit],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            start_new_session=True,
            timeout=_PROBE_SEC,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0
