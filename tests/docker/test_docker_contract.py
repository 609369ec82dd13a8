from __future__ import annotations

import pytest
from contracts.container_contract import ContainerContract

from ares_exp.containers.container import ContainerFactory, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory

pytestmark = pytest.mark.docker


class TestDockerContainer(ContainerContract):
    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return DockerContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        env = {"FROM_SPEC": "spec", "BOTH": "spec"}
        return ContainerSpec("contract", docker_image="debian:bookworm-slim", env=env)
