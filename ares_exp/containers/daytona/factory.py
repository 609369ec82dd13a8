"""Sandboxes of the Daytona service: the factory that Hydra instantiates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import pydantic

from ares_exp.containers.container import Container, ContainerSpec, Shell
from ares_exp.containers.daytona.connection import Connections
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.containers.daytona.leftovers import remove_stale
from ares_exp.containers.daytona.options import CaptureWay, DaytonaOptions
from ares_exp.containers.daytona.sandbox_request import check_spec
from ares_exp.containers.network_policy import NetworkPolicy, normalise_host
from ares_exp.errors import ContainerServiceError, PreflightError
from ares_exp.secrets import is_sensitive, protect

_MAX_CPUS, _MAX_MB = 1024, 64 * 2**20
_MAX_TTL_MIN = 60 * 24 * 30


class DaytonaContainerFactory:
    """Makes sandboxes of the service that `DAYTONA_API_URL` names, with the key in `DAYTONA_API_KEY`."""

    name = "daytona"

    @pydantic.validate_call
    def __init__(
        self,
        *,
        snapshot: Annotated[str, pydantic.Field(min_length=1, max_length=200)] | None = None,
        cpus: Annotated[int, pydantic.Field(ge=1, le=_MAX_CPUS)] | None = None,
        memory_mb: Annotated[int, pydantic.Field(ge=1, le=_MAX_MB)] | None = None,
        storage_mb: Annotated[int, pydantic.Field(ge=1, le=_MAX_MB)] | None = None,
        ttl_min: Annotated[int, pydantic.Field(ge=1, le=_MAX_TTL_MIN)] | None = None,
        network: Literal["public", "no-network"] | None = None,
        allowed_hosts: Sequence[Annotated[str, pydantic.AfterValidator(normalise_host)]] | None = None,
        shell: Shell = "bash -lc",
        env: Mapping[str, str] | None = None,
        capture: CaptureWay | None = None,
    ) -> None:
        """Keeps the options; touches nothing.

        Args:
            snapshot: A named snapshot of the service that every sandbox starts from, whatever image a task asks for.
            cpus: Whole cores of every sandbox, instead of what tasks ask for.
            memory_mb: Likewise MiB of memory; the service gives whole GiB.
            storage_mb: Likewise MiB of disk.
            ttl_min: Minutes after which the service removes a sandbox that nobody keeps alive: what a run that was
                killed leaves. `None`: by each task's limits, and ten more.
            network: `public` or `no-network`, instead of what tasks ask for in any phase; `None` leaves it to the task.
            allowed_hosts: More hosts that may be reached in every phase, in the form of a task's: `no-network` with
                them is an allow-list.
            shell: What reads commands: `bash -lc` reads the image's profile files first; `bash -c` and `sh -c` are
                faster.
            env: Variables of every sandbox; those of the task win.
            capture: How snapshots keep a sandbox's files. `files`: what differs from its image, in the snapshot's own
                directory, so that it can be restored anywhere where that image is. `provider`: by a snapshot that the
                service takes and keeps; faster for large changes, and worth nothing without the service. `None`:
                `files` from when `check_snapshots` was called, as a run that takes snapshots does; before, sandboxes
                do not list their files when they start (about a second), and cannot be captured.
        """
        protect(value for name, value in (env or {}).items() if is_sensitive(name))
        self._options = DaytonaOptions(
            snapshot=snapshot,
            cpus=cpus,
            memory_mb=memory_mb,
            storage_mb=storage_mb,
            ttl_min=ttl_min,
            network=NetworkPolicy(network) if network is not None else None,
            allowed_hosts=frozenset(allowed_hosts or ()),
            env=dict(env or {}),
            shell=shell,
            capture=capture,
        )
        self._connections = Connections()

    def __call__(self, spec: ContainerSpec) -> Container:
        """A sandbox for `spec`, not started yet."""
        return DaytonaContainer(spec, self._options, self._connections)

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with, JSON-ready; of variables their names alone: their values may be secret."""
        options = self._options
        return {
            "snapshot": options.snapshot,
            "cpus": options.cpus,
            "memory_mb": options.memory_mb,
            "storage_mb": options.storage_mb,
            "ttl_min": options.ttl_min,
            "network": None if options.network is None else options.network.mode,
            "allowed_hosts": sorted(options.allowed_hosts),
            "shell": options.shell,
            "capture": options.capture,
            **({"env": sorted(options.env)} if options.env else {}),
        }

    async def preflight(self) -> None:
        """Checks that the service answers and takes the key, and removes what dead runs of this machine left there.

        Raises:
            PreflightError: No key, a key that the service does not take, or no answer.
        """
        connection = self._connections.acquire()
        try:
            await remove_stale(connection.service)
        except ContainerServiceError as error:
            raise PreflightError(f"container=daytona cannot be used. {error}") from error
        finally:
            await self._connections.release(connection)

    def check_snapshots(self) -> None:
        """Files of the sandboxes that are made from now on can be captured."""
        if self._options.capture is None:
            self._options = replace(self._options, capture="files")

    def check(self, spec: ContainerSpec) -> list[str]:
        """As `ContainerFactory.check`.

        Raises:
            UnsupportedTaskError: The task needs several services, or what the service does not have.
            TaskError: It has neither an image nor a Dockerfile, or the Dockerfile is malformed.
            ConfigError: Its limits are longer than a sandbox lives.
        """
        return check_spec(spec, self._options)
