"""The factory of `container=host`: this machine itself, for machines that allow no namespaces."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import pydantic

from ares_exp.containers.container import ContainerFactoryBase, ContainerSpec, Shell
from ares_exp.containers.dockerfile.steps import check_sources
from ares_exp.containers.local.host_container import NO_SNAPSHOTS, HostContainer
from ares_exp.containers.local.isolation import container_evidence
from ares_exp.containers.local.leftovers import remove_stale
from ares_exp.containers.local.machine_paths import check_paths
from ares_exp.containers.local.task_dockerfile import read_task_dockerfile
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC
from ares_exp.errors import ConfigError, ContainerError, PreflightError, UnsupportedTaskError

_PROBE = ContainerSpec(name="probe", start_timeout_sec=30.0)


class HostContainerFactory(ContainerFactoryBase):
    """Runs commands directly on this machine, as root, one episode at a time. Nothing is isolated.

    `LocalContainerFactory.find_leftovers` also lists what it leaves.
    """

    name = "host"
    has_terminals = True
    has_doors = True
    harmless_options = frozenset({"shell"})

    @pydantic.validate_call
    def __init__(self, *, shell: Shell = "bash -c") -> None:
        """Validates the options.

        Args:
            shell: The shell of commands: `bash -c` and `sh -c` keep the environment of the task's Dockerfile; `bash
                -lc` reads `/etc/profile` first, and Debian's resets `PATH`.
        """
        self._shell: Shell = shell

    def __call__(self, spec: ContainerSpec) -> HostContainer:
        """Makes a container for `spec`, not started yet."""
        return HostContainer(spec, shell=self._shell)

    @property
    def options(self) -> dict[str, Any]:
        return {"shell": self._shell}

    @property
    def is_isolated(self) -> bool:
        """No: commands see and change this machine."""
        return False

    @property
    def max_containers(self) -> int:
        """One: the paths are the machine's."""
        return 1

    async def preflight(self) -> None:
        """Checks that commands can run as root on this machine, and removes leftovers of killed runs.

        Raises:
            PreflightError: This user cannot run them, or another run uses the machine. The message names the ways out.
        """
        if sys.platform != "linux":
            raise PreflightError(f"container=host needs Linux, and this is {sys.platform}. Use container=docker.")
        if os.geteuid() != 0:
            raise PreflightError(
                "container=host needs root, because tasks use paths such as /app and /tests, and this process runs as "
                f"user {os.geteuid()}.{container_note()} {WAYS_OUT if container_evidence() else WAYS_OUT_ELSEWHERE}"
            )
        await asyncio.to_thread(remove_stale)
        try:
            async with self(_PROBE) as container:
                await container.exec("true", timeout_sec=30.0)
        except ContainerError as error:
            raise PreflightError(f"container=host cannot run commands on this machine: {error}") from error

    def check_snapshots(self) -> None:
        """Rejects snapshots: the files of this machine cannot be captured.

        Raises:
            ConfigError: Rejects every call.
        """
        raise ConfigError(NO_SNAPSHOTS)

    def check(self, spec: ContainerSpec) -> list[str]:
        """Checks that this machine can run `spec`.

        Returns:
            Warnings: limits that are not enforced, and a network that the task does not ask for.

        Raises:
            UnsupportedTaskError: Images, compose files, GPUs, unsupported Dockerfile instructions, networks that are
                restricted to hosts or differ between phases, and paths that exist on this machine.
            TaskError: The Dockerfile is missing or malformed.
        """
        if spec.gpus:
            raise UnsupportedTaskError(
                f"{spec.name}: container=host has no GPUs, the task asks for {spec.gpus}. Leave this task out."
            )
        if spec.networks not in ({PUBLIC}, {NO_NETWORK}):
            raise UnsupportedTaskError(
                f"{spec.name}: container=host gives every phase the network of this machine, and the task asks for an "
                "allow-list or for different networks. Use container=docker."
            )
        dockerfile = read_task_dockerfile(spec, backend=self.name)
        if dockerfile is not None and spec.context_dir is not None:
            check_sources(dockerfile, spec.context_dir)
        check_paths(spec, dockerfile)
        limits = {"cpus": spec.cpus, "memory_mb": spec.memory_mb, "storage_mb": spec.storage_mb}
        warnings = [f"{name}={value:g}: not enforced by container=host" for name, value in limits.items() if value]
        if spec.networks == {NO_NETWORK}:
            warnings.append("network: not cut off by container=host, although the task asks for none")
        return warnings


WAYS_OUT = (
    "Start it with root as the user (docker run --user 0), or mount the socket of its Docker engine and use "
    "container=docker, or use container=daytona."
)
"""The ways out for an ordinary user in a container."""

WAYS_OUT_ELSEWHERE = "Run as root, or use container=local or container=docker."


def container_note() -> str:
    """Returns a sentence if this machine is itself a container, with a space before it; otherwise an empty string."""
    found = container_evidence()
    return f" This machine is itself a container ({found})." if found else ""
