"""The factory of `container=daytona`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import pydantic

from ares_exp.containers.container import Container, ContainerFactoryBase, ContainerSpec, Shell
from ares_exp.containers.daytona.connection import Connections
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.containers.daytona.credentials import has_credentials
from ares_exp.containers.daytona.leftovers import check_answers, find_all, remove_stale
from ares_exp.containers.daytona.sandbox_request import DaytonaOptions, check_spec
from ares_exp.containers.network_policy import NetworkPolicy, normalise_host
from ares_exp.containers.ownership import Leftover
from ares_exp.errors import ContainerServiceError, ContainerServiceUnavailableError, PreflightError, UnreachableError
from ares_exp.records.secrets import is_sensitive, protect

_MAX_CPUS, _MAX_MB = 1024, 64 * 2**20
_MAX_TTL_MIN = 60 * 24 * 30
_MAX_LEASE_SEC = 3600


class DaytonaContainerFactory(ContainerFactoryBase):
    """Creates containers at the service in `DAYTONA_API_URL`, with the key in `DAYTONA_API_KEY`."""

    name = "daytona"
    harbor_name = "daytona"
    has_terminals = True
    forwards_ports = True
    harmless_options = frozenset(
        {"cpus", "memory_mb", "storage_mb", "ttl_min", "shell", "env", "forwarded_port_lease_sec"}
    )

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
        shell: Shell = "bash -c",
        env: Mapping[str, str] | None = None,
        forwarded_port_lease_sec: Annotated[int, pydantic.Field(ge=1, le=_MAX_LEASE_SEC)] = 2,
    ) -> None:
        """Validates the options.

        Args:
            snapshot: Named snapshot at the service from which every sandbox starts, regardless of the task's image.
            cpus: Whole cores for every sandbox, instead of the tasks' values.
            memory_mb: MiB of memory for every sandbox, instead of the tasks' values. The service allocates whole GiB.
            storage_mb: MiB of disk for every sandbox, instead of the tasks' values. The service allocates whole GiB.
            ttl_min: Number of minutes after which the service removes a sandbox that no run keeps alive, such as a
                leftover of a killed run. `None`: each task's limits plus ten minutes.
            network: `public` or `no-network`, instead of the task's network in all phases; `None` keeps the task's
                network.
            allowed_hosts: Additional allowed hosts in every phase: `[pypi.org,*.pythonhosted.org]`. With them,
                `no-network` becomes an allowlist.
            shell: Shell of commands: `bash -c` and `sh -c` keep the image's environment; `bash -lc` reads the image's
                profile files first, which reset `PATH` on Debian.
            env: Environment variables for every sandbox. The task's variables override them.
            forwarded_port_lease_sec: Number of seconds after which a sandbox's forwarded port closes if the run sends
                nothing, for example because it was killed. While the port is open, the run renews the lease four times
                in this period. If the renewals are late, the agent's connections are cut and the port opens again.
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
            forwarded_port_lease_sec=forwarded_port_lease_sec,
        )
        self._connections = Connections()

    def __call__(self, spec: ContainerSpec) -> Container:
        return DaytonaContainer(spec, self._options, self._connections)

    @property
    def options(self) -> dict[str, Any]:
        """The constructor's options as JSON values. `env` has only names of variables, because values may be secret."""
        options = asdict(self._options)
        env, network = options.pop("env"), options.pop("network")
        options["allowed_hosts"] = sorted(options["allowed_hosts"])
        return {**options, "network": network and network["mode"], **({"env": sorted(env)} if env else {})}

    async def preflight(self) -> None:
        """Checks that the service responds and accepts the key. Removes leftovers of this machine's dead runs.

        Raises:
            PreflightError: The key is missing or rejected, or the service does not respond.
        """
        connection = self._connections.acquire()
        try:
            await remove_stale(connection.service)
        except ContainerServiceError as error:
            raise PreflightError(f"container=daytona cannot be used. {error}") from error
        finally:
            await self._connections.release(connection)

    async def check_reachable(self) -> None:
        connection = self._connections.acquire()
        try:
            await check_answers(connection.service)
        except ContainerServiceUnavailableError as error:
            raise UnreachableError(str(error)) from error
        finally:
            await self._connections.release(connection)

    def check_snapshots(self) -> None:
        """Accepts snapshots, because the service supports them for every sandbox."""

    @classmethod
    def find_leftovers(cls, *, images: bool = False, snapshots: bool = False) -> Iterator[Leftover]:
        """Lists the sandboxes of runs at the service. Lists none if the environment has no credentials."""
        if has_credentials():
            try:
                yield from find_all(snapshots=snapshots)
            except (PreflightError, ContainerServiceError) as error:
                raise ContainerServiceError(
                    f"The resources of the Daytona service could not be listed. {error}"
                ) from error

    def check(self, spec: ContainerSpec) -> list[str]:
        return check_spec(spec, self._options)
