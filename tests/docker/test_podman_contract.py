"""The contracts of containers, of their forwarded ports, and of rewards, on Podman.

The daily run has the cases that depend on the engine; the nightly run has all cases.
"""

from collections.abc import Iterator

import pytest

from ares_exp.containers.container import ContainerFactory, ContainerSpec
from ares_exp.containers.docker.factory import PodmanContainerFactory
from ares_exp.containers.network_namespace import obstacle
from ares_exp.testing.container_contract import ContainerContract
from ares_exp.testing.forwarded_port_contract import ForwardedPortContract
from tests.docker.podman_service import IMAGE, missing_program, podman_service
from tests.reward_contract import RewardContract

# An image comes from the Docker engine.
pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.once, pytest.mark.slow]

OF_THE_ENGINE = {
    *("test_command_has_a_result", "test_declared_environment_is_set", "test_command_runs_as_the_user"),
    *("test_stopped_processes_time_out", "test_directory_is_uploaded", "test_directory_is_downloaded"),
    *("test_network_follows_the_policy", "test_stop_is_idempotent_and_commands_are_refused"),
    *("test_port_is_open_under_every_network", "test_stop_during_opening_does_not_hang"),
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
