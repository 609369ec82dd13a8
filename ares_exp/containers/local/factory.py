"""`container=local`: bubblewrap boxes on the host's own root. No engine, no image, milliseconds to start."""

from __future__ import annotations

import asyncio
from typing import Literal

import pydantic

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local.box_directory import remove_stale
from ares_exp.containers.local.bubblewrap import find_bwrap
from ares_exp.containers.local.container import LocalContainer, read_task_dockerfile
from ares_exp.containers.local.dockerfile_steps import check_sources
from ares_exp.errors import ContainerError, PreflightError, UnsupportedTaskError

_PROBE = ContainerSpec(name="probe", network="no-network", start_timeout_sec=30.0)


class LocalContainerFactory:
    """Makes local boxes."""

    name = "local"

    @pydantic.validate_call
    def __init__(self, *, network: Literal["no-network", "public"] = "no-network") -> None:
        """Keeps the options.

        Args:
            network: `"public"` gives a box the host's network, the services on its loopback included, unless the task
                asks for `no-network`. The default gives none, whatever the task asks for.
        """
        self._network = network

    def __call__(self, spec: ContainerSpec) -> LocalContainer:
        """A box for `spec`, not started yet."""
        return LocalContainer(spec, share_network=self._network == spec.network == "public")

    async def preflight(self) -> None:
        """Starts an empty box and stops it (about 20 ms), and removes what killed runs left.

        Raises:
            PreflightError: No bubblewrap, or the kernel does not let it work; with the remedies.
        """
        await asyncio.to_thread(find_bwrap)
        await asyncio.to_thread(remove_stale)
        try:
            async with self(_PROBE) as box:
                await box.exec("true", timeout_sec=30.0)
        except ContainerError as error:
            raise PreflightError(
                f"container=local cannot make a sandbox on this machine: {error} Remedies: run as root; or let "
                "ordinary users make user namespaces (Ubuntu 24.04: the distribution's bubblewrap 0.11 or newer, or "
                "an AppArmor profile for bwrap); or use container=docker."
            ) from error

    def check(self, spec: ContainerSpec) -> list[str]:
        """What a local box cannot do for `spec`.

        Returns:
            Warnings: limits that are not enforced.

        Raises:
            UnsupportedTaskError: Images, compose files, GPUs, and Dockerfile instructions that mean nothing here.
            TaskError: The Dockerfile is missing or malformed.
        """
        if spec.gpus:
            raise UnsupportedTaskError(
                f"{spec.name}: container=local has no GPUs, {spec.gpus} asked for. Leave this task out."
            )
        dockerfile = read_task_dockerfile(spec)
        if dockerfile is not None and spec.context_dir is not None:
            check_sources(dockerfile, spec.context_dir)
        limits = {"cpus": spec.cpus, "memory_mb": spec.memory_mb, "storage_mb": spec.storage_mb}
        return [f"{key}={value}: not enforced by container=local" for key, value in limits.items() if value]
