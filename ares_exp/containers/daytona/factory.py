"""The factory of `container=daytona`, and the removal of sandboxes that dead runs have left at the service.

The service removes them when their TTL ends. A new run or `ares-exp clean` removes them earlier.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import pydantic

from ares_exp.containers.container import Container, ContainerFactoryBase, ContainerSpec, Shell
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.containers.daytona.failures import plain
from ares_exp.containers.daytona.provider_snapshot import delete_kept, find_kept
from ares_exp.containers.daytona.sandbox_request import DaytonaOptions, check_spec
from ares_exp.containers.daytona.service import (
    Connections,
    Credentials,
    DaytonaService,
    delete_sandbox,
    has_credentials,
    state_of,
)
from ares_exp.containers.network_policy import NetworkPolicy, normalise_host
from ares_exp.containers.ownership import (
    HOST,
    NAME_PREFIX,
    RUN,
    SWEEP_SEC,
    Leftover,
    created_sec,
    describe,
    is_dead,
    log_removal,
    owner_labels,
)
from ares_exp.errors import (
    ContainerError,
    ContainerServiceError,
    ContainerServiceUnavailableError,
    PreflightError,
    UnreachableError,
)
from ares_exp.records.secrets import is_sensitive, protect

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

_MAX_CPUS, _MAX_MB = 1024, 64 * 2**20
_MAX_TTL_MIN = 60 * 24 * 30
_MAX_LEASE_SEC = 3600


class DaytonaContainerFactory(ContainerFactoryBase):
    """Creates containers at the service with the address `DAYTONA_API_URL` and the key `DAYTONA_API_KEY`."""

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
            snapshot: Name of a snapshot at the service. Every sandbox starts from it instead of the task's image.
            cpus: Whole cores for every sandbox, instead of the tasks' values.
            memory_mb: MiB of memory for every sandbox, instead of the tasks' values. The service allocates whole GiB.
            storage_mb: MiB of disk for every sandbox, instead of the tasks' values. The service allocates whole GiB.
            ttl_min: Number of minutes after which the service removes a sandbox that no run keeps alive, such as a
                leftover of a killed run. `None`: each task's limits plus ten minutes.
            network: `public` or `no-network`, instead of the task's network policies in all phases. `None` keeps the
                task's policies.
            allowed_hosts: Additional allowed hosts in every phase: `[pypi.org,*.pythonhosted.org]`. With them,
                `no-network` becomes an allowlist.
            shell: Shell of commands. `bash -c` and `sh -c` keep the image's environment variables. `bash -lc` first
                reads the image's profile files, which reset `PATH` on Debian.
            env: Environment variables for every sandbox. The task's variables override them.
            forwarded_port_lease_sec: Lease of a forwarded port in seconds. If the sandbox receives nothing from the run
                for this long, for example because the run was killed, it closes the port. The run renews the lease four
                times in this period. If a renewal is late, the agent's connections are cut and the port opens again.
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

        Raises `PreflightError` if the key is missing or rejected, or if the service does not respond.
        """
        service = self._connections.acquire()
        try:
            await remove_stale(service)
        except ContainerServiceError as error:
            raise PreflightError(f"container=daytona cannot be used. {error}") from error
        finally:
            await self._connections.release(service)

    async def check_reachable(self) -> None:
        from daytona import ListSandboxesQuery

        async def ask(client: AsyncDaytona) -> None:  # a small request
            async for _ in client.list(ListSandboxesQuery(limit=1), request_timeout=_ANSWER_SEC):
                return

        service = self._connections.acquire()
        try:
            await service.call("The service", ask, timeout_sec=_ANSWER_SEC, unreachable_sec=_UNREACHABLE_SEC)
        except ContainerServiceUnavailableError as error:
            raise UnreachableError(str(error)) from error
        finally:
            await self._connections.release(service)

    def check_snapshots(self) -> None:
        """Raises no error, because the service supports snapshots of every sandbox."""

    @classmethod
    def find_leftovers(cls, *, images: bool = False, snapshots: bool = False) -> Iterator[Leftover]:
        """Lists the sandboxes of runs at the service. Lists nothing if no credential is set."""
        if has_credentials():
            try:
                yield from find_all(snapshots=snapshots)
            except (PreflightError, ContainerServiceError) as error:
                raise ContainerServiceError(
                    f"The resources of the Daytona service could not be listed. {error}"
                ) from error

    def check(self, spec: ContainerSpec) -> list[str]:
        return check_spec(spec, self._options)


T = TypeVar("T")

_ANSWER_SEC = 15.0
_UNREACHABLE_SEC = 3.0  # for a wrong address: the user of a new run waits for the message
_PAGE = 100
_AT_A_TIME = 8
_LEAVING = frozenset({"destroying", "destroyed"})
_logger = logging.getLogger(__name__)


async def find(service: DaytonaService, *, of_this_machine: bool = False) -> list[Leftover]:
    """Lists the sandboxes of dead and active runs, on all machines or (`of_this_machine`) only on this machine."""
    from daytona import ListSandboxesQuery

    ours = {HOST: owner_labels()[HOST]} if of_this_machine else None
    query = ListSandboxesQuery(name=NAME_PREFIX, labels=ours, limit=_PAGE)

    async def ask(client: AsyncDaytona) -> list[AsyncSandbox]:
        return [
            sandbox
            async for sandbox in client.list(query, request_timeout=_ANSWER_SEC)
            if RUN in sandbox.labels and plain(sandbox.name) == sandbox.name and state_of(sandbox) not in _LEAVING
        ]

    sandboxes = await service.call(
        "The list of sandboxes", ask, timeout_sec=_ANSWER_SEC, unreachable_sec=_UNREACHABLE_SEC
    )
    return await asyncio.to_thread(lambda: [_leftover(service.credentials, sandbox) for sandbox in sandboxes])


async def remove_stale(service: DaytonaService) -> None:
    """Removes sandboxes of this machine's dead runs. Stops after `SWEEP_SEC`. Logs removals and failures."""
    stale = [leftover for leftover in await find(service, of_this_machine=True) if leftover.is_stale]
    slots = asyncio.Semaphore(_AT_A_TIME)

    async def remove(leftover: Leftover) -> None:
        async with slots:
            log_removal(leftover, await _reason_left(delete_sandbox(service, leftover.name)))

    try:
        async with asyncio.timeout(SWEEP_SEC):
            await asyncio.gather(*map(remove, stale))
    except TimeoutError:
        _logger.warning(
            "Sandboxes of dead runs were not removed within %g s. The service removes them after their TTL.", SWEEP_SEC
        )


def find_all(*, snapshots: bool) -> list[Leftover]:
    """Lists the sandboxes of runs. Also lists this machine's snapshots, as stale, if `snapshots` is true. Blocking."""
    credentials = Credentials.from_environment()

    async def look(service: DaytonaService) -> list[Leftover]:
        found, whose = await find(service), f"runs on {owner_labels()[HOST]}"
        for name, created in (await find_kept(service) if snapshots else {}).items():
            remove = functools.partial(_remove_blocking, credentials, delete_kept, name)
            found.append(Leftover("snapshot", name, whose, True, created, remove))
        return found

    return asyncio.run(_with_service(credentials, look))


def _leftover(credentials: Credentials, sandbox: AsyncSandbox) -> Leftover:
    return Leftover(
        kind="sandbox",
        name=sandbox.name,
        whose=plain(describe(sandbox.labels)),
        is_stale=is_dead(sandbox.labels, since_boot=True),
        created=created_sec(sandbox.created_at),
        remove=functools.partial(_remove_blocking, credentials, delete_sandbox, sandbox.name),
    )


def _remove_blocking(
    credentials: Credentials, delete: Callable[[DaytonaService, str], Coroutine[Any, Any, None]], name: str
) -> str:
    return asyncio.run(_with_service(credentials, lambda service: _reason_left(delete(service, name))))


async def _with_service(credentials: Credentials, use: Callable[[DaytonaService], Awaitable[T]]) -> T:
    service = DaytonaService(credentials)
    try:
        return await use(service)
    finally:
        await service.close()


async def _reason_left(removal: Coroutine[Any, Any, None]) -> str:
    """Awaits a removal. Returns the reason if it failed, otherwise `""`."""
    try:
        await removal
    except ContainerError as error:
        return str(error)
    return ""
