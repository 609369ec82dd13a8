"""What local boxes left on this machine: their directories, which name their cgroups; and cgroups without a directory.

There is nothing else. The mounts of a box are in a mount namespace of its own and go with its last process, which goes
when its runner does. Also the directories go then (`box_directory`), unless whatever killed the runner killed what it
had left in charge of that too. A group has lost its directory when somebody else removed that (a cleaner of `/tmp`,
say), and is known by its name.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ares_exp.containers import owned_directory
from ares_exp.containers.leftover import Leftover
from ares_exp.containers.local.box_directory import PURPOSE, delete, folders
from ares_exp.containers.local.cgroup import remove_group
from ares_exp.containers.local.cgroup_place import PROBE_PREFIX, find_groups
from ares_exp.containers.ownership import is_dead_mark

_MARKED = re.compile(rf"(?:{owned_directory.name_prefix(PURPOSE)}|{PROBE_PREFIX})((\d+)-\d+-[0-9a-f]+)-.+")
_logger = logging.getLogger(__name__)


def remove_stale() -> None:
    """Removes what dead runs of this user left. Blocking; never raises."""
    for leftover in (*find(), *owned_directory.find_short_lived()):
        if leftover.is_stale and (problem := leftover.remove()):
            what = (leftover.kind, leftover.name, leftover.whose)
            _logger.warning("The %s %s of %s, which is dead, stays: %s.", *what, problem)


def find() -> Iterator[Leftover]:
    """The directories of all boxes of this user, those of the living included; dead ones' groups without. Blocking."""
    yield from owned_directory.find(PURPOSE, "box directory", delete, folders())
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
    return "" if remove_group(group) else "something in it is still running"
