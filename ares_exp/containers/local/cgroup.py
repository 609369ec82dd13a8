"""The cgroups of a local box, which hold its limits, where this process may make groups (`cgroup_place`).

A box has a group of its own, named like its directory, for each controller that limits it. The directory names its
groups, so whoever finds what a dead run left finds them too. bubblewrap is started in them (`box`). From inside they
can be neither seen nor changed: a box has a cgroup namespace and no `/sys`.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ares_exp.containers.local.cgroup_place import Controller, usable_places

RECORD = "cgroups"
"""The file in a box's directory that names its groups, a path a line."""

_PERIOD_USEC, _LEAST_QUOTA_USEC = 100_000, 1000
_EMPTY_SEC, _POLL_SEC = 2.0, 0.005
_RESERVE = 16
_SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a box may use at most; `None` is unlimited.

    Attributes:
        cpus: Processors; fractions count.
        memory_mb: MiB of memory and swap, the box's files included where they are in memory.
        pids: Processes and threads.
    """

    cpus: float | None = None
    memory_mb: int | None = None
    pids: int | None = None

    def settings(self, *, unified: bool) -> dict[Controller, dict[str, str]]:
        """For each controller that is needed: its files and what goes into them, the limit itself first."""
        found: dict[Controller, dict[str, str]] = {}
        if self.cpus is not None:
            quota = max(int(self.cpus * _PERIOD_USEC), _LEAST_QUOTA_USEC)
            found["cpu"] = (
                {"cpu.max": f"{quota} {_PERIOD_USEC}"}
                if unified
                else {"cpu.cfs_quota_us": f"{quota}", "cpu.cfs_period_us": f"{_PERIOD_USEC}"}
            )
        if self.memory_mb is not None:
            limit = str(self.memory_mb * 1024**2)
            found["memory"] = (
                {"memory.max": limit, "memory.swap.max": "0"}
                if unified
                else {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
            )
        if self.pids is not None:
            found["pids"] = {"pids.max": str(self.pids)}
        return found


def make_groups(directory: Path, limits: Limits) -> None:
    """Makes the groups of a box, as far as that is possible here, with its limits set.

    Args:
        directory: The box's directory; `RECORD` in it names them, also when there are none.
        limits: What may be used.

    Raises:
        OSError: A group cannot be made, or the kernel refuses a limit.
    """
    files: dict[Path, dict[str, str]] = {}
    for controller, place in usable_places().items():
        settings = limits.settings(unified=place.unified).get(controller)
        if settings is not None:
            files.setdefault(place.directory / directory.name, {}).update(settings)
    (directory / RECORD).write_text("".join(f"{group}\n" for group in files))
    for group, settings in files.items():
        group.mkdir()
        for name, value in settings.items():
            _set(group / name, value)


def _set(file: Path, value: str) -> None:
    if file.name in _SWAP and not file.exists():  # the kernel does not account for it
        return
    try:
        file.write_text(value)
    except OSError as error:
        if error.errno != errno.EINVAL or file.name != "cpu.cfs_quota_us":
            raise
        # Version 1 refuses a group more processors than the one around it has, which limits it then.


class Reserve:
    """Room for some processes above a box's limit, open only when the box is full and somebody needs a new shell.

    What fills the box may have to be killed by that shell.
    """

    def __init__(self, directory: Path) -> None:
        """Finds the limit of the box whose directory this is, if it has one; its groups are made."""
        self._directory = directory
        self._limit = _number(directory, "pids.max")
        self._users = 0

    def open(self) -> None:
        """Makes room, if there is none. `close` follows."""
        self._users += 1
        if _number(self._directory, "pids.current") + _RESERVE > self._limit > 0:
            self._set(self._limit + _RESERVE)

    def close(self) -> None:
        """Sets the limit again, with the last who needs more. What has found room keeps it."""
        self._users -= 1
        if not self._users and _number(self._directory, "pids.max") > self._limit:
            self._set(self._limit)

    def _set(self, limit: int) -> None:
        with contextlib.suppress(OSError):  # the box has ended, and its groups with it
            for file in (group / "pids.max" for group in groups_of_box(self._directory)):
                if file.exists():
                    file.write_text(str(limit))


def groups_of_box(directory: Path) -> list[Path]:
    """The groups that a box's directory names.

    Raises:
        OSError: It could not be read, which is not to say that there are none.
    """
    try:
        lines = (directory / RECORD).read_text().splitlines()
    except FileNotFoundError:  # written before the first group is made
        return []
    return [group for line in lines if (group := Path(line)).name == directory.name]


def remove_groups(directory: Path) -> bool:
    """Removes the groups of a box that has ended, waiting a moment for its last processes to be gone.

    Returns:
        Whether none is left. False: something in them would not die, or they could not be found out; try again later.
    """
    try:
        left = [group for group in groups_of_box(directory) if not remove_group(group)]
    except OSError:
        return False
    return not left


def remove_group(group: Path) -> bool:
    """Removes a group, waiting a moment for its last processes to be gone. Whether it is."""
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
            (group / "cgroup.kill").write_text("1")  # version 2 has it
        time.sleep(_POLL_SEC)


def oom_kills(directory: Path) -> int:
    """How many processes of a box the kernel has killed because its memory was used up."""
    return _number(directory, "memory.events", "oom_kill") or _number(directory, "memory.oom_control", "oom_kill")


def lack_of_memory(directory: Path, *, holds_files: bool) -> str:
    """A clause for a box whose memory was used up at some time; `""` for any other.

    Args:
        directory: The box's directory.
        holds_files: Whether the box's files are in memory.
    """
    count = oom_kills(directory)
    if not count:
        return ""
    memory = "its memory, which holds its files too," if holds_files else "its memory"
    return f"{memory} was used up, and the kernel killed {count} of its processes"


def lack_of_processes(directory: Path) -> str:
    """A clause for a box that has come up against its limit of processes and is still near it; `""` for any other."""
    limit, refused = _number(directory, "pids.max"), _number(directory, "pids.events", "max")
    if not refused or 2 * _number(directory, "pids.current") <= limit:
        return ""
    return f"what was left running in it uses up its limit of {limit} processes"


def _number(directory: Path, name: str, key: str = "") -> int:
    """What a file of a box's groups says, or its line for `key`; 0 where it says nothing."""
    with contextlib.suppress(OSError):
        for file in (group / name for group in groups_of_box(directory)):
            if file.exists() and (found := re.search(rf"^{key} ?(\d+)$", file.read_text(), re.MULTILINE)):
                return int(found[1])
    return 0
