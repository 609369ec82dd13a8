"""The contracts of containers, of their forwarded ports, and of rewards, on Podman.

The daily run has the cases that depend on the engine; the nightly run has all cases.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ares_exp.containers.container import ContainerFactory, ContainerSpec
from ares_exp.containers.docker.podman import PodmanContainerFactory
from ares_exp.containers.network_namespace import obstacle
from ares_exp.testing.container_contract import ContainerContract
from ares_exp.testing.forwarded_port_contract import ForwardedPortContract
from tests.docker.podman_service import IMAGE, missing_program, podman_service
from tests.reward_contract import RewardContract

# An image comes from the Docker engine.
pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.once, pytest.mark.slow]

OF_THE_ENGINE = {
    "test_result_of_a_command",
    "test_the_environment_is_as_declared",
    "test_user",
    "test_everything_stopped",
    "test_upload_of_a_directory",
    "test_download_of_a_directory",
    "test_the_network_follows_the_policy",
    "test_a_box_can_be_stopped_again_and_then_refuses_commands",
    "test_it_is_open_under_every_network",
    "test_a_stop_while_one_is_being_opened",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if lacking := missing_program():
        pytest.skip(f"{lacking} is not to be had here")
    with podman_service(tmp_path_factory.mktemp("podman")) as address:
        yield address


class OnPodman:
    @pytest.fixture
    def factory(self, service: str, monkeypatch: pytest.MonkeyPatch) -> ContainerFactory:
        monkeypatch.setenv("CONTAINER_HOST", service)
        return PodmanContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("contract", docker_image=IMAGE, env={"FROM_SPEC": "spec", "BOTH": "spec"})


class TestPodmanContainer(OnPodman, ContainerContract):
    by_night = frozenset(dir(ContainerContract)) - OF_THE_ENGINE
    networks = ContainerContract.networks - ({"allowlist"} if obstacle() else set())


class TestPodmanForwardedPorts(OnPodman, ForwardedPortContract):
    by_night = frozenset(dir(ForwardedPortContract)) - OF_THE_ENGINE


class TestPodmanRewards(OnPodman, RewardContract):
    """The same verification as with Docker, in the containers of another engine."""

    by_night = frozenset({"test_process_of_another_user_writes_no_reward"})
