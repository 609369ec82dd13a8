"""The upper directory of a container's overlay, where the engine keeps its changes, if readable from here.

Reading needs root on the engine's machine and an overlay storage driver. The kernel is asked where possible, as paths
and process numbers of an engine on another machine mean something else here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ares_exp.containers.local.isolation import mounts
from ares_exp.errors import SnapshotUnsupportedError

_CAP_SYS_ADMIN = 1 << 21
_ALL_IDS = ["0", "0", "4294967295"]


def find_upper_directory(inspected: Mapping[str, Any], proc: Path = Path("/proc")) -> Path:
    """Finds the upper directory of a running container. Blocking.

    Args:
        inspected: The inspected container.
        proc: The mount point of procfs.

    Raises:
        SnapshotUnsupportedError: It cannot be read from here; with the reason, to follow "because".
    """
    process = proc / str(inspected["State"]["Pid"])
    if not _can_read_overlays(proc):
        raise SnapshotUnsupportedError("this process is not root with CAP_SYS_ADMIN, as reading overlays needs")
    try:
        table = list(mounts(process))
        ids = (process / "uid_map").read_text().split()
    except OSError:
        raise SnapshotUnsupportedError("its processes are not visible here: the engine runs elsewhere") from None
    # The engine mounts files from a directory with this name.
    if not any(inspected["Id"] in mount.root for mount in table):
        raise SnapshotUnsupportedError(
            f"process {process.name} is not this container's here: the engine runs elsewhere"
        )
    if ids != _ALL_IDS:
        raise SnapshotUnsupportedError("its user ids are mapped (userns-remap, or a rootless engine)")
    root = [mount for mount in table if mount.point == Path("/")][-1]
    if root.kind != "overlay":
        raise SnapshotUnsupportedError("the engine's storage driver is not an overlay")
    options = {key: value for key, _, value in (option.partition("=") for option in root.options)}
    for feature in ("redirect_dir", "metacopy"):  # the directory is then incomplete
        if options.get(feature, _default(feature)) == "on":
            raise SnapshotUnsupportedError(f"its overlay uses {feature}")
    told = ((inspected.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
    upper = Path(told or options.get("upperdir", ""))
    if not upper.is_absolute() or not upper.is_dir():
        raise SnapshotUnsupportedError(f"its upper directory {upper} is not visible here")
    return upper


def _can_read_overlays(proc: Path) -> bool:
    """Returns whether this process sees attributes `trusted.*`, which the kernel hides from others."""
    try:
        status = (proc / "self" / "status").read_text()
    except OSError:
        return False
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return os.geteuid() == 0 and found is not None and bool(int(found[1], 16) & _CAP_SYS_ADMIN)


def _default(feature: str) -> str:
    try:
        return "on" if Path(f"/sys/module/overlay/parameters/{feature}").read_text().strip() == "Y" else "off"
    except OSError:
        return "off"
