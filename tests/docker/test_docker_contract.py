from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ares_exp.containers.container import Container, ContainerFactory, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.network_namespace import obstacle
from ares_exp.testing.container_contract import ContainerContract
from tests.reward_contract import RewardContract

pytestmark = [pytest.mark.docker, pytest.mark.once]

SPEC = ContainerSpec("contract", docker_image="debian:bookworm-slim", env={"FROM_SPEC": "spec", "BOTH": "spec"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_box() -> AsyncIterator[Container]:
    async with DockerContainerFactory()(SPEC) as box:
        yield box


@pytest.mark.asyncio(loop_scope="module")
class TestDockerContainer(ContainerContract):
    """The suite on one container, except for the tests that need their own."""

    networks = ContainerContract.networks - ({"allowlist"} if obstacle() else set())

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return DockerContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return SPEC

    @pytest.fixture
    def box(self, shared_box: Container) -> Container:
        return shared_box


class TestDockerRewards(RewardContract):
    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return DockerContainerFactory()
