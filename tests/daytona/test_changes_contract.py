"""The contract of captured and restored files on sandboxes, over the real SDK.

The most of it is played by night: Docker starts every request's shell slowly.
`test_capture` and `test_restore` look at the same code without a service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ares_exp.containers.container import ContainerFactory, ContainerSpec
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.testing.changes_contract import ChangesContract
from tests.daytona.conftest import emulated
from tests.daytona.emulator import Emulator


@pytest.mark.docker
@pytest.mark.once
class TestSandboxChanges(ChangesContract):
    by_night = frozenset(dir(ChangesContract)) - {"test_every_kind_of_change_comes_back"}

    @pytest.fixture
    async def emulator(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Emulator]:
        async with emulated(monkeypatch, box="docker") as emulator:
            self._emulator = emulator
            yield emulator

    @pytest.fixture
    def factory(self, emulator: Emulator) -> ContainerFactory:
        return DaytonaContainerFactory(capture="files")

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("changes", docker_image="python:3.12-slim")

    @pytest.fixture
    def other_base(self) -> str:
        return "daytona:image=python:3.11-slim"

    async def left(self) -> list[str]:
        return sorted(sandbox.name for sandbox in self._emulator.sandboxes.values())
