"""The capabilities of a Docker engine, from its `GET /info`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of an engine. The defaults hold for every engine.

    Attributes:
        cpus: Number of processors.
        disk_quota: Whether it can bound the size of a container's files.
        nvidia_runtime: Whether NVIDIA's container runtime is installed.
        cdi_gpus: Device names of GPUs known by the Container Device Interface.
        is_podman: Whether it is Podman, which speaks Docker's protocol.
    """

    cpus: int = 1
    disk_quota: bool = False
    nvidia_runtime: bool = False
    cdi_gpus: tuple[str, ...] = ()
    is_podman: bool = False

    @property
    def simultaneous_starts(self) -> int:
        """Bound on simultaneous starts: more make each start slower and all together no faster."""
        return min(16, max(8, 2 * self.cpus))


def capabilities_of(info: Mapping[str, Any]) -> Capabilities:
    """Parses the answer to `GET /info`."""
    devices = info.get("DiscoveredDevices") or []
    return Capabilities(
        cpus=int(info["NCPU"]),
        disk_quota=has_disk_quota(info, _MOUNTS.read_text("utf-8", "replace") if _MOUNTS.exists() else ""),
        nvidia_runtime="nvidia" in (info.get("Runtimes") or {}),
        cdi_gpus=tuple(device["ID"] for device in devices if re.fullmatch(r"nvidia\.com/gpu=\d+", device["ID"])),
        is_podman="BuildahVersion" in info,
    )


def has_disk_quota(info: Mapping[str, Any], mounts: str) -> bool:
    """Returns whether the storage driver takes a size: btrfs, zfs, and overlay2 on XFS mounted with project quotas do.

    The engine does not report mount options. They are read on this machine, so an engine elsewhere counts as one
    without quotas.

    Args:
        info: The answer to `GET /info`.
        mounts: This machine's mounts in the form of `/proc/mounts`.
    """
    driver, status = info.get("Driver"), dict(info.get("DriverStatus") or [])
    if driver in ("btrfs", "zfs"):
        return True
    if driver != "overlay2" or status.get("Backing Filesystem") != "xfs":
        return False
    root, found = Path(info.get("DockerRootDir") or "/"), (Path("/"), "")
    for line in mounts.splitlines():
        point, kind, options = Path(line.split()[1]), *line.split()[2:4]
        if root.is_relative_to(point) and kind == "xfs" and len(point.parts) >= len(found[0].parts):
            found = (point, options)
    return bool({"prjquota", "pquota"} & set(found[1].split(",")))
