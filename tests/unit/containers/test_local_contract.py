"""The container contract on the local sandbox. Runs as root and as an ordinary user."""

import pytest

from ares_exp.containers.container import ContainerFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.isolation import is_privileged
from ares_exp.testing.container_contract import ContainerContract
from tests.unit.containers.local_containers import needs_local

pytestmark = needs_local


class TestLocalContract(ContainerContract):
    other_user = "nobody" if is_privileged() else None
    networks = frozenset({"no-network"})

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return LocalContainerFactory()
