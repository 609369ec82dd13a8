"""The contracts of containers and of their doors, on Podman."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ares_exp.containers.container import ContainerFactory, ContainerSpec
from ares_exp.containers.docker.podman import PodmanContainerFactory
from ares_exp.containers.network_namespace import obstacle
from ares_exp.testing.container_contract import ContainerContract
from ares_exp.testing.door_contract import DoorContract
from tests.docker.podman_service import IMAGE, podman_service

pytestmark = [pytest.mark.podman, pytest.mark.once, pytest.mark.slow]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with podman_service(tmp_path_factory.mktemp("podman")) as address:
        yield address


@pytest.fixture
def factory(service: str, monkeypatch: pytest.MonkeyPatch) -> ContainerFactory:
    monkeypatch.setenv("CONTAINER_HOST", service)
    return PodmanContainerFactory()


class TestPodmanContainer(ContainerContract):
    networks = ContainerContract.networks - ({"allowlist"} if obstacle() else set())

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("contract", docker_image=IMAGE, env={"FROM_SPEC": "spec", "BOTH": "spec"})


class TestPodmanDoors(DoorContract):
    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("contract", docker_image=IMAGE)
