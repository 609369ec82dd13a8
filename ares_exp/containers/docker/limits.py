"""The limits of a Docker container, as far as the engine supports them."""

from __future__ import annotations

from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.capabilities import Capabilities
from ares_exp.errors import UnsupportedTaskError

_MiB = 1024 * 1024


def limits(spec: ContainerSpec, can: Capabilities, *, swap_mb: int, pids_limit: int) -> dict[str, Any]:
    """Returns arguments of docker-py's `create_host_config` for the limits of `spec`.

    Args:
        spec: What the task asks for.
        can: The engine's capabilities; limits that it lacks, which `unenforced` names, are left out.
        swap_mb: Swap on top of the memory limit.
        pids_limit: Bound on processes.

    Raises:
        UnsupportedTaskError: It asks for GPUs that the engine lacks.
    """
    found: dict[str, Any] = {"pids_limit": pids_limit}
    if spec.cpus is not None:  # the engine refuses more than it has
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
    """Returns the device request for `count` GPUs. Containers share them: an engine assigns the first ones each time.

    Raises:
        UnsupportedTaskError: The engine lacks them.
    """
    from docker.types import DeviceRequest

    if can.nvidia_runtime:
        return dict(DeviceRequest(count=count, capabilities=[["gpu"]]))
    if len(can.cdi_gpus) >= count:
        return dict(DeviceRequest(driver="cdi", device_ids=list(can.cdi_gpus[:count])))
    has = f"only {len(can.cdi_gpus)}" if can.cdi_gpus else "neither NVIDIA's runtime nor GPUs known by CDI"
    raise UnsupportedTaskError(
        f"Task {name} asks for {count} GPU{'s' if count > 1 else ''}; the Docker engine has {has}. Install the NVIDIA "
        "Container Toolkit on the engine's machine (`docker info` then lists the runtime `nvidia`), set DOCKER_HOST "
        "to an engine with GPUs, or leave this task out."
    )


def unenforced(spec: ContainerSpec, can: Capabilities) -> list[str]:
    """Returns a warning for each limit that the engine cannot enforce.

    Raises:
        UnsupportedTaskError: It asks for GPUs that the engine lacks.
    """
    if spec.gpus:
        gpu_request(spec.name, spec.gpus, can)
    if spec.storage_mb is not None and not can.disk_quota:
        return [
            f"storage_mb={spec.storage_mb}: not enforced by container=docker (the engine's storage cannot bound a "
            "container; overlay2 on XFS mounted with pquota, btrfs and zfs can)"
        ]
    return []
