"""The factory of `container=local`: bubblewrap containers on the host's files, without an engine or an image."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from ares_exp.containers.container import ROOT_NAMES, ContainerFactoryBase, ContainerSpec, Shell
from ares_exp.containers.local.cgroup import usable_cgroup_paths
from ares_exp.containers.local.container import ONLY_ROOT, LocalContainer, read_task_dockerfile
from ares_exp.containers.local.container_directory import find, find_storage, remove_stale
from ares_exp.containers.local.isolation import (
    WAYS_OUT,
    container_evidence,
    container_note,
    find_bwrap,
    find_isolation,
    is_privileged,
)
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC
from ares_exp.containers.ownership import Leftover
from ares_exp.errors import ContainerError, PreflightError, UnsupportedTaskError

if TYPE_CHECKING:
    from ares_exp.containers.local.host_factory import HostContainerFactory

_PROBE = ContainerSpec(name="probe", network=NO_NETWORK, start_timeout_sec=30.0)

_logger = logging.getLogger(__name__)


class LocalContainerFactory(ContainerFactoryBase):
    """Creates bubblewrap containers, which start in milliseconds."""

    name = "local"
    has_terminals = True
    forwards_ports = True
    harmless_options = frozenset({"pids_limit", "shell"})

    @pydantic.validate_call
    def __init__(
        self,
        *,
        network: Literal["no-network", "build", "public"] = "no-network",
        shell: Shell = "bash -c",
        pids_limit: Annotated[int, pydantic.Field(ge=16)] = 4096,
    ) -> None:
        """Validates the options.

        Args:
            network: `no-network`: no network, whatever the task sets. `build`: the host's network only while a task's
                Dockerfile is applied, but no network for agents and tests. `public`: the host's network for the
                Dockerfile, and also for agents and tests if the task has a public network. The host's network includes
                services on its loopback and abstract sockets. `public` rejects tasks with `allowed_hosts`, or with
                different networks in their phases.
            shell: Shell of commands. `bash -c` and `sh -c` keep the environment variables of the task's Dockerfile.
                `bash -lc` first reads `/etc/profile`, which resets `PATH` on Debian.
            pids_limit: Maximum number of processes in one container, as a protection against fork bombs. Like a task's
                cpus and memory_mb, it is enforced only if this user may create cgroups.
        """
        self._network = network
        self._shell: Shell = shell
        self._pids_limit = pids_limit

    @property
    def _host(self) -> HostContainerFactory | None:
        """The factory of `container=host`, used if we are root in a container without namespaces; otherwise `None`."""
        if find_isolation().isolation != "none" or container_evidence() is None or os.geteuid() != 0:
            return None
        from ares_exp.containers.local.host_factory import HostContainerFactory

        return HostContainerFactory(shell=self._shell)

    @property
    def is_isolated(self) -> bool:
        """Whether this machine allows all namespaces, so that containers are fully isolated."""
        return find_isolation().isolation == "namespaces"

    @property
    def max_containers(self) -> int | None:
        """1 if commands run directly on this machine, otherwise `None` (no limit)."""
        return self._host.max_containers if self._host is not None else None

    def __call__(self, spec: ContainerSpec) -> LocalContainer:
        if self._host is not None:
            return self._host(spec)
        return LocalContainer(
            spec,
            share_network=self._network == "public" and spec.networks == {PUBLIC},
            build_network=self._network != "no-network",
            shell=self._shell,
            pids_limit=self._pids_limit,
        )

    @property
    def options(self) -> dict[str, Any]:
        return {"network": self._network, "shell": self._shell, "pids_limit": self._pids_limit}

    async def preflight(self) -> None:
        """Starts and stops an empty container as a test (about 20 ms), and removes leftovers of killed runs.

        Logs how containers are isolated on this machine, as a warning if some isolation is missing.

        Raises:
            PreflightError: bubblewrap is missing, or the kernel does not allow it. The message suggests fixes.
        """
        machine = await asyncio.to_thread(find_isolation)
        if self._host is not None:
            _logger.warning(
                "container=local runs commands directly on this machine, without isolation, as container=host does: "
                "this machine is itself a container (%s) and does not allow namespaces (%s)",
                container_evidence(),
                machine.problem,
            )
            return await self._host.preflight()
        await asyncio.to_thread(find_bwrap)
        if machine.isolation == "shared processes":
            _logger.warning(
                "container=local uses namespaces without a private /proc: containers see the processes of this "
                "machine.%s",
                container_note(),
            )
        elif machine.isolation == "namespaces":
            _logger.info("container=local uses namespaces")
        await asyncio.to_thread(remove_stale)
        try:
            async with self(_PROBE) as container:
                await container.exec("true", timeout_sec=30.0)
        except ContainerError as error:
            what = f"container=local cannot start a container on this machine: {error}{container_note()}"
            if container_evidence() and os.geteuid() != 0:
                raise PreflightError(
                    f"{what} Without namespaces, commands run in the paths of the machine itself, such as /app, "
                    f"which only root can create. {WAYS_OUT}"
                ) from error
            raise PreflightError(
                f"{what} Run as root, or allow ordinary users to create user namespaces (Ubuntu 24.04: the "
                "distribution's bubblewrap 0.11 or newer, or an AppArmor profile for bwrap), or use container=docker. "
                "As root, you can also use container=host, which has no isolation."
            ) from error

    def check_snapshots(self) -> None:
        """Raises `ConfigError` if commands run directly on this machine, whose files cannot be captured."""
        if self._host is not None:
            self._host.check_snapshots()

    @classmethod
    def find_leftovers(cls, *, images: bool = False, snapshots: bool = False) -> Iterator[Leftover]:
        if sys.platform == "linux":
            yield from find()

    def check(self, spec: ContainerSpec) -> list[str]:
        """Checks that a local container can run `spec`. Returns warnings about ignored limits and unreachable hosts.

        Raises:
            UnsupportedTaskError: The task needs an image, a compose file, GPUs, an unsupported Dockerfile instruction,
                users other than root (if this process is not privileged), or networks that differ between phases.
            TaskError: The Dockerfile is missing or malformed.
        """
        if self._host is not None:
            return self._host.check(spec)
        if self._network == "public" and spec.networks not in ({PUBLIC}, {NO_NETWORK}):
            raise UnsupportedTaskError(
                f"{spec.name}: container=local supports neither allowlists nor different networks per phase. Use "
                "container=docker, or run the task without a network: container.network=build "
                "(network access only while images are built) or container.network=no-network."
            )
        if not is_privileged() and (users := {str(user) for user in spec.users}.difference(ROOT_NAMES)):
            raise UnsupportedTaskError(
                f"{spec.name}: the task runs commands as {', '.join(sorted(users))}. {ONLY_ROOT}"
            )
        read_task_dockerfile(spec)
        warnings = [f"{limit}: not enforced by container=local ({why})" for limit, why in _not_enforced(spec)]
        if any(policy.allowed_hosts for policy in spec.networks):
            warnings.append(
                f"{spec.name}: container=local runs the task without a network, so it cannot reach its allowed_hosts"
            )
        return warnings


def _not_enforced(spec: ContainerSpec) -> Iterator[tuple[str, str]]:
    enforced = usable_cgroup_paths()
    no_groups = "this user may not create cgroups, but root usually may"
    if spec.cpus and "cpu" not in enforced:
        yield f"cpus={spec.cpus:g}", no_groups
    if spec.memory_mb and "memory" not in enforced:
        yield f"memory_mb={spec.memory_mb}", no_groups
    if spec.storage_mb:
        storage = find_storage()
        bounded = storage.in_memory and spec.memory_mb and "memory" in enforced
        bound = f"bounded by memory_mb={spec.memory_mb}" if bounded else "not bounded"
        where = "memory" if storage.in_memory else str(storage.folder)
        yield f"storage_mb={spec.storage_mb}", f"the container's files are in {where}, {bound}"
