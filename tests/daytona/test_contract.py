"""The container contract on sandboxes, over the real SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ares_exp.containers.container import ContainerFactory, ContainerSpec
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from tests.contracts.container_contract import ContainerContract
from tests.daytona.conftest import emulated
from tests.daytona.emulator import Emulator

pytestmark = pytest.mark.once


class TestDaytonaContainer(ContainerContract):
    networks = frozenset({"no-network"})  # the emulator's sandboxes are local boxes here

    @pytest.fixture
    def factory(self, emulator: Emulator) -> ContainerFactory:
        return DaytonaContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        env = {"FROM_SPEC": "spec", "BOTH": "spec"}
        return ContainerSpec("contract", docker_image="debian:12.9", env=env)


@pytest.mark.docker
class TestDaytonaContainerOnDocker(ContainerContract):
    """The same where a sandbox has an image and a network of its own."""

    networks = frozenset({"no-network", "public"})

    @pytest.fixture
    async def emulator(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Emulator]:
        async with emulated(monkeypatch, box="docker") as emulator:
            yield emulator

    @pytest.fixture
    def factory(self, emulator: Emulator) -> ContainerFactory:
        return DaytonaContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        env = {"FROM_SPEC": "spec", "BOTH": "spec"}
        return ContainerSpec("contract", docker_image="debian:bookworm-slim", env=env)
