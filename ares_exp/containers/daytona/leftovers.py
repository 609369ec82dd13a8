"""Leftover sandboxes at the service, removed at a run's start or by `clean`, before their TTL ends."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ares_exp.containers.daytona.creation import delete_sandbox
from ares_exp.containers.daytona.credentials import Credentials
from ares_exp.containers.daytona.failures import plain
from ares_exp.containers.daytona.provider_snapshot import delete_kept, find_kept
from ares_exp.containers.daytona.service import DaytonaService, state_of
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
from ares_exp.errors import ContainerError

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

T = TypeVar("T")

_ANSWER_SEC = 15.0
_UNREACHABLE_SEC = 3.0  # for a wrong address: the user of a new run waits for the message
_PAGE = 100
_AT_A_TIME = 8
_LEAVING = frozenset({"destroying", "destroyed"})
_logger = logging.getLogger(__name__)


async def find(service: DaytonaService, *, of_this_machine: bool = False) -> list[Leftover]:
    """Lists the sandboxes of dead and active runs on all machines, or only on this machine."""
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


async def check_answers(service: DaytonaService) -> None:
    """Checks with a small request that the service responds. Raises `ContainerServiceError` if it does not."""
    from daytona import ListSandboxesQuery

    async def ask(client: AsyncDaytona) -> None:
        async for _ in client.list(ListSandboxesQuery(limit=1), request_timeout=_ANSWER_SEC):
            return

    await service.call("The service", ask, timeout_sec=_ANSWER_SEC, unreachable_sec=_UNREACHABLE_SEC)


async def remove_stale(service: DaytonaService) -> None:
    """Removes leftovers of this machine's dead runs, within `SWEEP_SEC`. Logs failures."""
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
            "Sandboxes of dead runs still exist after %g s. The service removes them when their TTL ends.", SWEEP_SEC
        )


def find_all(*, snapshots: bool) -> list[Leftover]:
    """Lists the sandboxes of runs. With `snapshots`, also lists this machine's snapshots, as stale. Blocking."""
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
    """Awaits a removal. Returns the reason if it failed, or `""` if the resource is removed or being removed."""
    try:
        await removal
    except ContainerError as error:
        return str(error)
    return ""
