from __future__ import annotations

import pytest

from ares_exp.containers.container import ContainerFactory, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.network_namespace import obstacle
from ares_exp.testing.container_contract import ContainerContract

pytestmark = [pytest.mark.docker, pytest.mark.once]


class TestDockerContainer(ContainerContract):
    networks = ContainerContract.networks - ({"allowlist"} if obstacle() else set())

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return DockerContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        env = {"FROM_SPEC": "spec", "BOTH": "spec"}
        return ContainerSpec("contract", docker_image="debian:bookworm-slim", env=env)
