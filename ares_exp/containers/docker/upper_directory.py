"""Where the engine keeps what a container changed, when that can be read from here: the upper directory of its overlay.

That takes root on the engine's machine and a storage driver that is an overlay. All that can be known is asked of the
kernel, since an engine on another machine names paths and process numbers that mean something else here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ares_exp.errors import SnapshotUnsupportedError

_CAP_SYS_ADMIN = 1 << 21
_ALL_IDS = ["0", "0", "4294967295"]


def find_upper_directory(inspected: Mapping[str, Any], proc: Path = Path("/proc")) -> Path:
    """The upper directory of a container that runs. Blocking.

    Args:
        inspected: What the engine says of the container.
        proc: Where the kernel tells of processes.

    Raises:
        SnapshotUnsupportedError: It cannot be read from here; the reason follows on "because".
    """
    process = proc / str(inspected["State"]["Pid"])
    if not _is_mighty(proc):
        raise SnapshotUnsupportedError("this process is not root with CAP_SYS_ADMIN, who reads overlays")
    try:
        mounts = (process / "mountinfo").read_text("utf-8", "surrogateescape")
        ids = (process / "uid_map").read_text().split()
    except OSError:
        raise SnapshotUnsupportedError("its processes are not seen from here: the engine is elsewhere") from None
    if inspected["Id"] not in mounts:  # the engine mounts files of a directory of this name
        raise SnapshotUnsupportedError(f"process {process.name} is not of this container here: the engine is elsewhere")
    if ids != _ALL_IDS:
        raise SnapshotUnsupportedError("its user ids are mapped (userns-remap, or a rootless engine)")
    options = _root_overlay(mounts)
    if options is None:
        raise SnapshotUnsupportedError("the engine's storage driver is not an overlay")
    for feature in ("redirect_dir", "metacopy"):  # the directory says not all then
        if options.get(feature, _default(feature)) == "on":
            raise SnapshotUnsupportedError(f"its overlay uses {feature}")
    told = ((inspected.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
    upper = Path(told or options.get("upperdir", ""))
    if not upper.is_absolute() or not upper.is_dir():
        raise SnapshotUnsupportedError(f"its upper directory {upper} is not seen from here")
    return upper


def _is_mighty(proc: Path) -> bool:
    """Whether attributes `trusted.*` can be read; to others they are not there."""
    try:
        status = (proc / "self" / "status").read_text()
    except OSError:
        return False
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return os.geteuid() == 0 and found is not None and bool(int(found[1], 16) & _CAP_SYS_ADMIN)


def _root_overlay(mounts: str) -> dict[str, str] | None:
    """The options of the overlay on `/`; see `man proc_pid_mountinfo` for the lines."""
    found = None
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split(" ")[4] == "/":
            name, _, options = kind.split(" ", 2)
            pairs = (option.partition("=") for option in options.split(","))
            found = {key: _plain(value) for key, _, value in pairs} if name == "overlay" else None
    return found


def _plain(value: str) -> str:
    r"""The kernel writes spaces and their like as `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), value)


def _default(feature: str) -> str:
    try:
        return "on" if Path(f"/sys/module/overlay/parameters/{feature}").read_text().strip() == "Y" else "off"
    except OSError:
        return "off"
