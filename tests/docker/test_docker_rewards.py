from __future__ import annotations

import pytest

from ares_exp.containers.container import ContainerFactory
from ares_exp.containers.docker import DockerContainerFactory
from tests.reward_contract import RewardContract

pytestmark = [pytest.mark.docker, pytest.mark.once]


class TestDockerRewards(RewardContract):
    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return DockerContainerFactory()
