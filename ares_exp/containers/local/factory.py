"""`container=local`: bubblewrap boxes on the host's own root. No engine, no image, milliseconds to start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.dockerfile.steps import check_sources
from ares_exp.containers.local.box import ROOT_NAMES
from ares_exp.containers.local.box_storage import find_storage
from ares_exp.containers.local.bubblewrap import find_bwrap, is_privileged
from ares_exp.containers.local.cgroup_place import usable_places
from ares_exp.containers.local.container import LocalContainer
from ares_exp.containers.local.leftovers import remove_stale
from ares_exp.containers.local.task_dockerfile import ONLY_ROOT, read_task_dockerfile
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC
from ares_exp.errors import ContainerError, PreflightError, UnsupportedTaskError

_PROBE = ContainerSpec(name="probe", network=NO_NETWORK, start_timeout_sec=30.0)


class LocalContainerFactory:
    """Makes local boxes."""

    name = "local"

    @pydantic.validate_call
    def __init__(
        self,
        *,
        network: Literal["no-network", "public"] = "no-network",
        pids_limit: Annotated[int, pydantic.Field(ge=16)] = 4096,
    ) -> None:
        """Keeps the options.

        Args:
            network: `"public"` gives a box the host's network, the services on its loopback included, unless the task
                asks for less. The default gives none, whatever the task asks for.
            pids_limit: Bound on the processes of one box, so that a fork bomb stays inside. Enforced, like a task's
                cpus and memory_mb, where this user may make cgroups.
        """
        self._network = network
        self._pids_limit = pids_limit

    def __call__(self, spec: ContainerSpec) -> LocalContainer:
        """A box for `spec`, not started yet."""
        share_network = self._network == "public" and spec.networks == {PUBLIC}
        return LocalContainer(spec, share_network=share_network, pids_limit=self._pids_limit)

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with, JSON-ready."""
        return {"network": self._network, "pids_limit": self._pids_limit}

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

    def check_snapshots(self) -> None:
        """Files of local boxes can be captured."""

    def check(self, spec: ContainerSpec) -> list[str]:
        """What a local box cannot do for `spec`.

        Returns:
            Warnings: limits that are not enforced, hosts that cannot be reached.

        Raises:
            UnsupportedTaskError: Images, compose files, GPUs, Dockerfile instructions that mean nothing here, users
                that the box will not have, and networks that differ between phases.
            TaskError: The Dockerfile is missing or malformed.
        """
        if spec.gpus:
            raise UnsupportedTaskError(
                f"{spec.name}: container=local has no GPUs, {spec.gpus} asked for. Leave this task out."
            )
        if self._network == "public" and spec.networks not in ({PUBLIC}, {NO_NETWORK}):
            raise UnsupportedTaskError(
                f"{spec.name}: container=local knows no allowed_hosts, and gives every phase the same network. Use "
                "container=docker, or play the task without a network by container.network=no-network."
            )
        if not is_privileged() and (users := {str(user) for user in spec.users}.difference(ROOT_NAMES)):
            raise UnsupportedTaskError(f"{spec.name}: commands are to run as {', '.join(sorted(users))}. {ONLY_ROOT}")
        dockerfile = read_task_dockerfile(spec)
        if dockerfile is not None and spec.context_dir is not None:
            check_sources(dockerfile, spec.context_dir)
        warnings = [f"{limit}: not enforced by container=local ({why})" for limit, why in _not_enforced(spec)]
        if any(policy.allowed_hosts for policy in spec.networks):
            warnings.append(f"{spec.name}: container=local gives it no network, not even its allowed_hosts")
        return warnings


def _not_enforced(spec: ContainerSpec) -> Iterator[tuple[str, str]]:
    """The limits of `spec` that a box here does not have, and why."""
    enforced = usable_places()
    no_groups = "this user may make no cgroups for it here; root mostly may"
    if spec.cpus and "cpu" not in enforced:
        yield f"cpus={spec.cpus:g}", no_groups
    if spec.memory_mb and "memory" not in enforced:
        yield f"memory_mb={spec.memory_mb}", no_groups
    if spec.storage_mb:
        storage = find_storage()
        bounded = storage.in_memory and spec.memory_mb and "memory" in enforced
        bound = f"bounded by memory_mb={spec.memory_mb}" if bounded else "not bounded"
        place = "memory" if storage.in_memory else str(storage.folder)
        yield f"storage_mb={spec.storage_mb}", f"its files are in {place}, {bound}"
