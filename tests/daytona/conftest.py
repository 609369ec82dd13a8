"""Fixtures of the tests that need a Daytona service: the emulator, and the variables that lead to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.containers.daytona.service import Credentials, DaytonaService

if TYPE_CHECKING:  # they import the SDK, which not all tests here need
    from tests.daytona.emulator import Emulator


def tasks() -> set[str]:
    """What runs in this loop, except for the emulator's connections and the test."""
    running = {task.get_coro() for task in asyncio.all_tasks()}
    names = {coroutine.__qualname__ for coroutine in running if coroutine is not None}
    return {name for name in names if not name.startswith(("RequestHandler", "test_"))}


@contextlib.asynccontextmanager
async def emulated(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[Emulator]:
    """A service that `DAYTONA_API_KEY` and `DAYTONA_API_URL` name."""
    from tests.daytona.emulator import Emulator

    async with Emulator(**options) as emulator:
        for name in ("DAYTONA_JWT_TOKEN", "DAYTONA_ORGANIZATION_ID", "DAYTONA_TARGET"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("DAYTONA_API_KEY", emulator.api_key)
        monkeypatch.setenv("DAYTONA_API_URL", emulator.url)
        yield emulator
        assert emulator.unknown == []


@pytest_asyncio.fixture
async def emulator(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Emulator]:
    """A service whose sandboxes are local boxes."""
    async with emulated(monkeypatch, box="local") as emulator:
        yield emulator


class OnSandboxes:
    """The fixtures of a contract's suite on sandboxes, which are local boxes or Docker containers."""

    backend = "local"

    @pytest_asyncio.fixture
    async def emulator(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Emulator]:
        async with emulated(monkeypatch, box=self.backend) as emulator:
            self._emulator = emulator
            yield emulator

    @pytest.fixture
    def factory(self, emulator: Emulator) -> DaytonaContainerFactory:
        return DaytonaContainerFactory()


@pytest_asyncio.fixture
async def service(emulator: Emulator) -> AsyncIterator[DaytonaService]:
    """A connection to the emulator, which does not wait for long between tries."""
    service = DaytonaService(Credentials.from_environment(), base_sec=0.05)
    yield service
    await service.close()


@pytest_asyncio.fixture
async def factory(emulator: Emulator) -> AsyncIterator[DaytonaContainerFactory]:
    """Makes sandboxes over one connection to the emulator, which does not wait for long between tries."""
    factory = DaytonaContainerFactory()
    service = factory._connections.acquire()
    service._base_sec = 0.05
    yield factory
    await factory._connections.release(service)


@pytest_asyncio.fixture
async def box(factory: DaytonaContainerFactory) -> AsyncIterator[DaytonaContainer]:
    async with factory(ContainerSpec("t", docker_image="debian:12.9")) as box:
        assert isinstance(box, DaytonaContainer)
        yield box
