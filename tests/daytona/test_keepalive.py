"""Sandboxes live on while their runner does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from daytona import AsyncSandbox, CreateSandboxFromSnapshotParams

from ares_exp.containers.daytona.connection import KeepAlive
from ares_exp.containers.daytona.service import DaytonaService
from tests.daytona.conftest import until
from tests.daytona.emulator import Emulator, Fault

pytestmark = [pytest.mark.local, pytest.mark.once]


@pytest.fixture
async def keep_alive(service: DaytonaService) -> AsyncIterator[KeepAlive]:
    keep_alive = KeepAlive(service, minute_sec=0.05)
    yield keep_alive
    await keep_alive.close()


async def new(service: DaytonaService) -> AsyncSandbox:
    return await service.client.create(CreateSandboxFromSnapshotParams())


def count(emulator: Emulator, sandbox: AsyncSandbox, what: str) -> int:
    return sum(request.path == f"/api/sandbox/{sandbox.id}/{what}" for request in emulator.requests)


async def test_the_end_is_put_off_again_and_again(
    emulator: Emulator, service: DaytonaService, keep_alive: KeepAlive
) -> None:
    first, second = await new(service), await new(service)
    keep_alive.add(first, 3)
    keep_alive.add(second, 6)
    for sandbox, ttl in ((first, "ttl/3"), (second, "ttl/6")):
        await until(lambda: count(emulator, sandbox, ttl) >= 3)  # noqa: B023
        await until(lambda: count(emulator, sandbox, "last-activity") >= 3)  # noqa: B023
    assert all(sandbox.expiry is not None for sandbox in emulator.sandboxes.values())


async def test_lost_and_discarded_sandboxes_are_not_renewed(
    emulator: Emulator, service: DaytonaService, keep_alive: KeepAlive, caplog: pytest.LogCaptureFixture
) -> None:
    lost, left, kept = [await new(service) for _ in range(3)]
    emulator.lose(lost.id)
    for sandbox in (lost, left, kept):
        keep_alive.add(sandbox, 3)
    keep_alive.discard(left)
    keep_alive.discard(left)
    await until(lambda: count(emulator, kept, "ttl/3") >= 4)
    assert [count(emulator, sandbox, "ttl/3") for sandbox in (lost, left)] == [1, 0]
    assert not caplog.records


async def test_failures_are_survived_with_one_warning(
    emulator: Emulator, service: DaytonaService, keep_alive: KeepAlive, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await new(service)
    refusal = emulator.faults.add(Fault("status", "POST", "/ttl/3", status=403, times=3))
    keep_alive.add(sandbox, 3)
    await until(lambda: count(emulator, sandbox, "last-activity") >= 1)
    assert refusal.hits == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "answers 403" in warnings[0]


async def test_close_cancels_a_pending_renewal(emulator: Emulator, service: DaytonaService) -> None:
    keep_alive = KeepAlive(service, minute_sec=0.05)
    slow = emulator.faults.add(Fault("slow", "POST", "/ttl/3", seconds=1))
    keep_alive.add(await new(service), 3)
    await until(lambda: slow.hits == 1)
    await keep_alive.close()
    await keep_alive.close()
    assert "KeepAlive._renew" not in {getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()}
