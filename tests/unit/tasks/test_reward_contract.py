import pytest

from ares_exp.containers.container import ContainerFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.isolation import is_privileged
from tests.reward_contract import RewardContract

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(not is_privileged(), reason="local containers of an ordinary user have only one user"),
]


class TestLocalRewards(RewardContract):
    docker_image = None

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return LocalContainerFactory()
