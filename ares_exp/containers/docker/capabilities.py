"""The features of a Docker engine, from its response to `GET /info`, and the limits that it can enforce."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.errors import UnsupportedTaskError

_MOUNTS = Path("/proc/self/mounts")

_MiB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of an engine. The default values assume an engine without optional features.

    `disk_quota` is true if the engine can limit the size of a container's files. `cdi_gpus` are the names of the
    engine's GPUs in the Container Device Interface.
    """

    cpus: int = 1
    disk_quota: bool = False
    nvidia_runtime: bool = False
    cdi_gpus: tuple[str, ...] = ()
    is_podman: bool = False

    @property
    def simultaneous_starts(self) -> int:
        """Maximum number of containers that start at the same time. More would only make each start slower."""
        return min(16, max(8, 2 * self.cpus))


def capabilities_of(info: Mapping[str, Any]) -> Capabilities:
    """Returns the features of an engine from its response to `GET /info`."""
    devices = info.get("DiscoveredDevices") or []
    return Capabilities(
        cpus=int(info["NCPU"]),
        disk_quota=has_disk_quota(info, _MOUNTS.read_text("utf-8", "replace") if _MOUNTS.exists() else ""),
        nvidia_runtime="nvidia" in (info.get("Runtimes") or {}),
        cdi_gpus=tuple(device["ID"] for device in devices if re.fullmatch(r"nvidia\.com/gpu=\d+", device["ID"])),
        is_podman="BuildahVersion" in info,
    )


def has_disk_quota(info: Mapping[str, Any], mounts: str) -> bool:
    """Returns whether the engine can limit the size of a container's files.

    The storage drivers btrfs and zfs always can. The driver overlay2 can only if its files are on XFS, mounted with
    project quotas. The engine does not report mount options, so they are read from this machine's `mounts`. A remote
    engine with overlay2 therefore counts as unable.
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


def limits(spec: ContainerSpec, can: Capabilities, *, swap_mb: int, pids_limit: int) -> dict[str, Any]:
    """Returns arguments of docker-py's `create_host_config` for the limits of `spec` that the engine enforces."""
    found: dict[str, Any] = {"pids_limit": pids_limit}
    if spec.cpus is not None:  # the engine rejects more processors than it has
        found["nano_cpus"] = int(min(spec.cpus, can.cpus) * 1e9)
    if spec.memory_mb is not None:
        found["mem_limit"] = spec.memory_mb * _MiB
        found["memswap_limit"] = (spec.memory_mb + swap_mb) * _MiB
    if spec.storage_mb is not None and can.disk_quota:
        found["storage_opt"] = {"size": f"{spec.storage_mb}m"}
    if spec.gpus:
        found["device_requests"] = [gpu_request(spec.name, spec.gpus, can)]
    return found


def gpu_request(name: str, count: int, can: Capabilities) -> dict[str, Any]:
    """Returns the device request for the engine's first `count` GPUs, which all containers therefore share.

    Raises `UnsupportedTaskError` if the engine does not have enough GPUs.
    """
    from docker.types import DeviceRequest

    if can.nvidia_runtime:
        return dict(DeviceRequest(count=count, capabilities=[["gpu"]]))
    if len(can.cdi_gpus) >= count:
        return dict(DeviceRequest(driver="cdi", device_ids=list(can.cdi_gpus[:count])))
    has = f"only {len(can.cdi_gpus)}" if can.cdi_gpus else "neither NVIDIA's runtime nor CDI devices for GPUs"
    raise UnsupportedTaskError(
        f"Task {name} needs {count} GPU{'s' if count > 1 else ''}, but the Docker engine has {has}. Install the NVIDIA "
        "Container Toolkit on the engine's machine (`docker info` then lists the runtime `nvidia`), set DOCKER_HOST "
        "to an engine with GPUs, or leave this task out."
    )


def unenforced(spec: ContainerSpec, can: Capabilities) -> list[str]:
    """Returns a warning for each limit that the engine cannot enforce. Raises the errors of `gpu_request`."""
    if spec.gpus:
        gpu_request(spec.name, spec.gpus, can)
    if spec.storage_mb is not None and not can.disk_quota:
        return [
            f"storage_mb={spec.storage_mb}: not enforced by container=docker (the engine's storage driver cannot limit "
            "the disk space of a container; overlay2 on XFS mounted with pquota, btrfs and zfs can)"
        ]
    return []
