"""The cgroups of a local container, which enforce its limits if this process may create cgroups.

A container has a cgroup for each controller (cpu, memory, pids) that limits it. The cgroup has the same name as the
container's directory. The directory contains a list of the cgroups, so that they can be removed if the run dies. A
container can neither see nor change its cgroups, because it has a cgroup namespace and no `/sys`. New cgroups are
children of this process's cgroup, so that a limit on the run also applies to its containers. In version 2, a cgroup
that contains processes cannot have children with limits. New cgroups are then siblings of this process's cgroup, in a
parent that systemd has delegated.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ares_exp.containers.local.isolation import mounts, run_detached
from ares_exp.containers.ownership import owner_mark

RECORD = "cgroups"
"""Name of the file in a container's directory that lists its cgroups, one path per line."""

_PERIOD_USEC, _LEAST_QUOTA_USEC = 100_000, 1000
_EMPTY_SEC, _POLL_SEC = 2.0, 0.005
_RESERVE = 16
_SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")

Controller = Literal["cpu", "memory", "pids"]
PROBE_PREFIX = "ares_exp-probe-"
"""Name prefix of cgroups that are created only for a test. In a name, the result of `owner_mark()` follows."""
_OURS = "ares_exp-"
_UNIFIED = "unified"
_PROBE_SEC = 10.0
_SEARCH_SEC = 5.0
# A separate process creates the group, enters it and removes it, even if we are killed in the meantime.
_PROBE = """
mkdir "$1" || exit
(echo 0 >"$1/cgroup.procs" && [ -w "$1/$2" ])
works=$?
rmdir "$1"
exit $works
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a container; `None` is unlimited. `cpus` may be a fraction; `pids` includes threads.

    `memory_mb` limits memory and swap together, in MiB. If the container's files are in memory, they count as well.
    """

    cpus: float | None = None
    memory_mb: int | None = None
    pids: int | None = None

    def settings(self, *, unified: bool) -> dict[Controller, dict[str, str]]:
        """Returns the cgroup files to write and their values, by controller. `unified` means version 2 of cgroups."""
        quota = max(int((self.cpus or 0) * _PERIOD_USEC), _LEAST_QUOTA_USEC)
        memory = str((self.memory_mb or 0) * 1024**2)
        found: dict[Controller, tuple[float | None, dict[str, str], dict[str, str]]] = {
            "cpu": (
                self.cpus,
                {"cpu.max": f"{quota} {_PERIOD_USEC}"},
                {"cpu.cfs_quota_us": f"{quota}", "cpu.cfs_period_us": f"{_PERIOD_USEC}"},
            ),
            "memory": (
                self.memory_mb,
                {"memory.max": memory, "memory.swap.max": "0"},
                {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
            ),
            "pids": (self.pids, {"pids.max": str(self.pids)}, {"pids.max": str(self.pids)}),
        }
        return {name: new if unified else old for name, (limit, new, old) in found.items() if limit is not None}


def make_groups(directory: Path, limits: Limits) -> None:
    """Creates a container's cgroups and sets its limits, as far as possible. Always writes `RECORD` to `directory`."""
    files: dict[Path, dict[str, str]] = {}
    for controller, path in usable_cgroup_paths().items():
        settings = limits.settings(unified=path.unified).get(controller)
        if settings is not None:
            files.setdefault(path.directory / directory.name, {}).update(settings)
    (directory / RECORD).write_text("".join(f"{group}\n" for group in files))
    for group, settings in files.items():
        group.mkdir()
        for name, value in settings.items():
            _set(group / name, value)


def _set(file: Path, value: str) -> None:
    if file.name in _SWAP and not file.exists():  # the kernel does not account for swap
        return
    try:
        file.write_text(value)
    except OSError as error:
        if error.errno != errno.EINVAL or file.name != "cpu.cfs_quota_us":
            raise
        # Version 1 rejects more processors than the parent group has; then the parent limits the group.


class Reserve:
    """A temporary increase of a container's process limit, so that a new shell can start and kill processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._limit = _number(directory, "pids.max")
        self._users = 0

    @property
    def is_needed(self) -> bool:
        """Whether the container has nearly reached its process limit. Ended processes count until they are reaped."""
        return _number(self._directory, "pids.current") + _RESERVE > self._limit > 0

    def open(self) -> None:
        """Increases the process limit if it is nearly reached. The caller must call `close` afterwards, in any case."""
        self._users += 1
        if self.is_needed:
            self._set(self._limit + _RESERVE)

    def close(self) -> None:
        """Restores the limit when every `open` has been closed. Processes above the limit keep running."""
        self._users -= 1
        if not self._users and _number(self._directory, "pids.max") > self._limit:
            self._set(self._limit)

    def _set(self, limit: int) -> None:
        with contextlib.suppress(OSError):  # the container and its groups have ended
            for file in (group / "pids.max" for group in groups_of(self._directory)):
                if file.exists():
                    file.write_text(str(limit))


def groups_of(directory: Path) -> list[Path]:
    """Returns a container's cgroups, as listed in `RECORD` in its directory."""
    try:
        lines = (directory / RECORD).read_text().splitlines()
    except FileNotFoundError:  # written before the first group is created
        return []
    return [group for line in lines if (group := Path(line)).name == directory.name]


def remove_groups(directory: Path) -> bool:
    """Removes an ended container's cgroups. Returns `False` if processes in them are still alive."""
    try:
        return not [group for group in groups_of(directory) if not remove_group(group)]
    except OSError:
        return False


def remove_group(group: Path) -> bool:
    """Removes a cgroup. Kills its processes and waits briefly for them to end. Returns whether the cgroup is gone."""
    deadline = time.monotonic() + _EMPTY_SEC
    while True:
        try:
            group.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
        with contextlib.suppress(OSError):
            (group / "cgroup.kill").write_text("1")  # only version 2 has this file
        time.sleep(_POLL_SEC)


def oom_kills(directory: Path) -> int:
    """Returns the number of the container's processes that the kernel killed because memory ran out."""
    return _number(directory, "memory.events", "oom_kill") or _number(directory, "memory.oom_control", "oom_kill")


def lack_of_memory(directory: Path, *, holds_files: bool) -> str:
    """Returns a clause for an error message if the kernel killed processes for lack of memory, otherwise `""`.

    If `holds_files` is true, the clause mentions that the container's files are in this memory.
    """
    memory = "its memory, which also contains its files," if holds_files else "its memory"
    count = oom_kills(directory)
    return f"{memory} was used up, and the kernel killed {count} of its processes" if count else ""


def lack_of_processes(directory: Path) -> str:
    """Returns a clause for an error message if the container has used up its process limit, otherwise `""`."""
    limit, refused = _number(directory, "pids.max"), _number(directory, "pids.events", "max")
    is_full = refused and 2 * _number(directory, "pids.current") > limit
    return f"its remaining processes use up its limit of {limit} processes" if is_full else ""


def _number(directory: Path, name: str, key: str = "") -> int:
    """Returns the number after `key` on a line of a cgroup file. Returns 0 if the file or the line is missing."""
    with contextlib.suppress(OSError):
        for file in (group / name for group in groups_of(directory)):
            if file.exists() and (found := re.search(rf"^{key} ?(\d+)$", file.read_text(), re.MULTILINE)):
                return int(found[1])
    return 0


@dataclass(frozen=True, slots=True)
class CgroupPath:
    """The directory of a cgroup in which this process may create child cgroups. `unified` is true for version 2."""

    directory: Path
    unified: bool


@functools.cache
def usable_cgroup_paths() -> Mapping[Controller, CgroupPath]:
    """Returns the cgroups in which this process can create child cgroups, by controller.

    The result is cached. The first call takes some milliseconds.
    """
    found = {controller: find_cgroup_path(controller) for controller in get_args(Controller)}
    return {controller: path for controller, path in found.items() if path is not None}


def find_cgroup_path(controller: Controller) -> CgroupPath | None:
    """Returns the nearest cgroup, from our own upwards, in which `controller` can limit children, or `None`."""
    with contextlib.suppress(OSError):  # no cgroups, a group that is being removed, an unusual mount
        return next((path for path in candidates(controller) if _works(path, controller)), None)
    return None


def candidates(controller: Controller, process: Path = Path("/proc/self")) -> Iterator[CgroupPath]:
    """Yields the cgroups that `find_cgroup_path` should try, nearest first. May enable `controller` in our cgroup."""
    groups = _groups_of(process)
    if controller in groups:
        yield CgroupPath(groups[controller][0], unified=False)
    elif _UNIFIED in groups:
        group, top = groups[_UNIFIED]
        with contextlib.suppress(OSError):  # rejected in a group with processes, except in the root group
            (group / "cgroup.subtree_control").write_text(f"+{controller}")
        while True:
            if controller in (group / "cgroup.subtree_control").read_text().split():
                yield CgroupPath(group, unified=True)
            limits = [group / name for name in ("cpu.max", "memory.max", "memory.high")]
            if group == top or any(not limit.read_text().startswith("max") for limit in limits if limit.exists()):
                return  # a container in a sibling group would escape the limits of this process
            group = group.parent


def find_groups(process: Path = Path("/proc/self")) -> Iterator[Path]:
    """Yields all visible cgroups with our name prefix, whichever process created them. Stops after `_SEARCH_SEC`."""
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
    """Returns a process's cgroups with their mount points, by controller (version 1) or `unified` (version 2)."""
    paths = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys((controllers or _UNIFIED).split(","), path))
    found: dict[str, tuple[Path, Path]] = {}
    for name, root, point in _hierarchies(process):
        if name in paths:
            inside = os.path.relpath(paths[name], root)
            if inside.split("/")[0] != "..":  # otherwise our group is outside of this mount
                found.setdefault(name, (point / inside, point))
    return found


def _hierarchies(process: Path) -> Iterator[tuple[str, str, Path]]:
    """Yields the cgroup mounts that a process sees: the name of the hierarchy, the mounted cgroup and the mount point.

    The name is `unified` for version 2. A mount of version 1 is yielded once for each of its mount options, which
    include the names of its controllers.
    """
    for mount in mounts(process):
        for name in {"cgroup": mount.options, "cgroup2": (_UNIFIED,)}.get(mount.kind, ()):
            yield name, mount.root, mount.point


def _works(path: CgroupPath, controller: Controller) -> bool:
    group = path.directory / f"{PROBE_PREFIX}{owner_mark()}-{secrets.token_hex(4)}"
    limit_file = next(iter(Limits(1, 1, 1).settings(unified=path.unified)[controller]))
    probe = ["/bin/sh", "-c", _PROBE, "sh", str(group), limit_file]
    try:
        return run_detached(probe, _PROBE_SEC).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
