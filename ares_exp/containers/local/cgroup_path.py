"""The cgroups below which this process may make groups for containers, found by a test; cgroup v1 and v2.

New groups lie below this process's group, so that a limit set around the run holds for its containers too. Where
version 2 forbids that (a group with processes has no limited children), they lie beside it, where systemd delegates.
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
"""Name prefix of test groups; the owner mark follows."""

_OURS = "ares_exp-"
_UNIFIED = "unified"
_LIMIT_FILES = {
    True: {"cpu": "cpu.max", "memory": "memory.max", "pids": "pids.max"},
    False: {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes", "pids": "pids.max"},
}
_PROBE_SEC = 10.0
_SEARCH_SEC = 5.0

# A separate process creates the group, enters it and removes it, also when we are killed meanwhile.
_PROBE = """
mkdir "$1" || exit
(echo 0 >"$1/cgroup.procs" && [ -w "$1/$2" ])
works=$?
rmdir "$1"
exit $works
"""


@dataclass(frozen=True, slots=True)
class CgroupPath:
    """A cgroup below which we may make groups of containers.

    Attributes:
        directory: Its directory.
        unified: Whether it is of version 2.
    """

    directory: Path
    unified: bool


@functools.cache
def usable_cgroup_paths() -> Mapping[Controller, CgroupPath]:
    """Returns, by controller, the group below which this process can make groups. Tested once, in some milliseconds.

    The resource of a missing controller cannot be limited here.
    """
    found = {controller: find_cgroup_path(controller) for controller in get_args(Controller)}
    return {controller: path for controller, path in found.items() if path is not None}


def find_cgroup_path(controller: Controller, process: Path = Path("/proc/self")) -> CgroupPath | None:
    """Finds the nearest group, from the group of a process upwards, below which groups with `controller` work.

    Args:
        controller: The controller.
        process: The process's directory in `/proc`.
    """
    with contextlib.suppress(OSError):  # a group that is being removed, an unusual mount
        return next((path for path in candidates(controller, process) if _works(path, controller)), None)
    return None


def candidates(controller: Controller, process: Path = Path("/proc/self")) -> Iterator[CgroupPath]:
    """Yields the candidates of `find_cgroup_path`, nearest first. Groups managed by others stay unchanged."""
    groups = _groups_of(process)
    if controller in groups:
        yield CgroupPath(groups[controller][0], unified=False)
    elif _UNIFIED in groups:
        group, top = groups[_UNIFIED]
        with contextlib.suppress(OSError):  # refused in a group with processes, except in the root group
            (group / "cgroup.subtree_control").write_text(f"+{controller}")
        while True:
            if controller in (group / "cgroup.subtree_control").read_text().split():
                yield CgroupPath(group, unified=True)
            if group == top or _is_limited(group):
                return  # beside it, a container would escape the limits set around us
            group = group.parent


def find_groups(process: Path = Path("/proc/self")) -> Iterator[Path]:
    """Yields all visible groups named like ours, of any process. Blocking, for `_SEARCH_SEC` at most.

    Args:
        process: As `find_cgroup_path`.
    """
    if not (process / "cgroup").exists():  # a kernel without cgroups
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
    """Returns, for each version-1 controller and `unified`, the process's group and the hierarchy's mount point."""
    if not (process / "cgroup").exists():  # a kernel without cgroups
        return {}
    paths = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys((controllers or _UNIFIED).split(","), path))
    found: dict[str, tuple[Path, Path]] = {}
    for name, root, point in _hierarchies(process):
        if name in paths:
            inside = os.path.relpath(paths[name], root)
            if inside.split("/")[0] != "..":  # else our group is outside of this mount
                found.setdefault(name, (point / inside, point))
    return found


def _hierarchies(process: Path) -> Iterator[tuple[str, str, Path]]:
    """Yields, for each version-1 controller and `unified`, the mounted group of that hierarchy and its mount point."""
    for mount in mounts(process):
        for name in {"cgroup": mount.options, "cgroup2": (_UNIFIED,)}.get(mount.kind, ()):
            yield name, mount.root, mount.point


def _is_limited(group: Path) -> bool:
    limits = [group / name for name in ("cpu.max", "memory.max", "memory.high")]
    return any(not limit.read_text().startswith("max") for limit in limits if limit.exists())


def _works(path: CgroupPath, controller: Controller) -> bool:
    group = path.directory / f"{PROBE_PREFIX}{owner_mark()}-{secrets.token_hex(4)}"
    limit = _LIMIT_FILES[path.unified][controller]
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
