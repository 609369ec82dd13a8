"""Leftovers of local containers on this machine: directories, which list their cgroups, and orphaned cgroups.

There are no others. A container's mounts are in its mount namespace and vanish with its last process, which ends with
the runner. The directories are removed then too (`container_directory`), unless the remover was killed with the runner.
A cgroup without directory remains if another program removed the directory (a cleaner of `/tmp`, say); its name
identifies it.
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
from ares_exp.containers.local.cgroup import remove_group
from ares_exp.containers.local.cgroup_path import PROBE_PREFIX, find_groups
from ares_exp.containers.local.container_directory import PURPOSE, delete, folders
from ares_exp.containers.ownership import is_dead_mark

_MARKED = re.compile(rf"(?:{owned_directory.name_prefix(PURPOSE)}|{PROBE_PREFIX})((\d+)-\d+-[0-9a-f]+)-.+")
_logger = logging.getLogger(__name__)


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
