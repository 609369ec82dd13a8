"""The contracts of containers, of captured and restored files, and of verification on sandboxes, over the real SDK.

Sandboxes of the emulator are local boxes, which are fast and cover all cases except networks. Docker containers cover
networks. The nightly run also runs the other cases there, where every request is a `docker exec`.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ares_exp.containers.container import Container, ContainerFactory, ContainerSpec
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.containers.local.isolation import is_privileged
from ares_exp.containers.network_policy import NO_NETWORK, NetworkMode
from ares_exp.testing.changes_contract import ChangesContract
from ares_exp.testing.container_contract import ContainerContract
from ares_exp.testing.forwarded_port_contract import RelayedForwardedPortContract
from tests.daytona.conftest import OnSandboxes, emulated
from tests.reward_contract import RewardContract

pytestmark = pytest.mark.once

OF_THE_SERVICE = {
    *("test_port_is_open_under_every_network", "test_megabytes_pass_each_way"),
    *("test_stalled_connection_does_not_block_others", "test_cancelled_opening_releases_the_port"),
    *("test_stop_during_opening_does_not_hang", "test_stopped_container_has_no_forwarded_ports"),
    *("test_killed_relay_is_restarted_once", "test_closed_port_leaves_no_relay"),
}
"""What the service has a part in; the rest of a relay is the same on every backend."""

NETWORKS = pytest.mark.parametrize(
    "start", ["no-network", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("public", "allowlist"))]
)
"""Local boxes have one of them."""


SPEC = ContainerSpec("contract", docker_image="debian:12.9", env={"FROM_SPEC": "spec", "BOTH": "spec"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_box() -> AsyncIterator[Container]:
    with pytest.MonkeyPatch.context() as environment:
        async with emulated(environment, box="local"), DaytonaContainerFactory()(SPEC) as box:
            yield box


@pytest.mark.asyncio(loop_scope="module")
class TestDaytonaContainer(ContainerContract):
    other_user = "nobody" if is_privileged() else None
    networks = frozenset({"no-network"})  # the emulator's sandboxes are local boxes here

    @pytest.fixture
    def factory(self, shared_box: Container) -> ContainerFactory:
        return DaytonaContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return SPEC

    @pytest.fixture
    def box(self, shared_box: Container) -> Container:
        return shared_box

    @NETWORKS
    async def test_network_follows_the_policy(
        self, factory: ContainerFactory, spec: ContainerSpec, start: NetworkMode
    ) -> None:
        await super().test_network_follows_the_policy(factory, spec, start)


class TestDaytonaForwardedPorts(OnSandboxes, RelayedForwardedPortContract):
    """Over a service that runs one command per request."""

    by_night = frozenset(dir(RelayedForwardedPortContract)) - OF_THE_SERVICE
    networks = frozenset({"no-network"})
    large_bytes = 2**19

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("forwarded_ports", docker_image="debian:12.9", network=NO_NETWORK)

    @NETWORKS
    async def test_port_is_open_under_every_network(
        self, factory: ContainerFactory, spec: ContainerSpec, start: NetworkMode
    ) -> None:
        await super().test_port_is_open_under_every_network(factory, spec, start)


@pytest.mark.docker
class TestDaytonaContainerOnDocker(OnSandboxes, ContainerContract):
    """The same for a sandbox with a separate image and network."""

    by_night = frozenset(dir(ContainerContract)) - {"test_unannounced_policy_is_refused"}
    networks = frozenset({"no-network", "public"})
    backend = "docker"

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("contract", docker_image="debian:bookworm-slim", env=SPEC.env)


@pytest.mark.docker
class TestSandboxChanges(OnSandboxes, ChangesContract):
    """Without cases about snapshot files on disk: the service keeps the files, and the disk has only the name."""

    by_night = frozenset(dir(ChangesContract)) - {"test_eight_containers_restore_one_capture"}
    backend = "docker"
    test_every_kind_of_change_round_trips = test_changes_accumulate_across_captures = test_secret_is_not_captured = None
    test_second_capture_reads_only_changes = test_change_with_same_size_and_time_is_detected = None
    test_capture_is_complete_in_any_store = test_captures_and_commands_run_concurrently = None
    test_containers_with_same_changes_are_independent = None
    test_cancelled_captures_leave_no_resources = test_stop_during_capture_leaves_no_resources = (
        test_damaged_store_is_refused
    ) = None

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("changes", docker_image="python:3.12-slim")

    @pytest.fixture
    def other_base(self) -> str:
        return "daytona:image=python:3.11-slim"

    async def left(self) -> list[str]:
        return sorted(sandbox.name for sandbox in self._emulator.sandboxes.values())


@pytest.mark.local
@pytest.mark.root
class TestDaytonaRewards(RewardContract):
    """The fixture `factory` is the one of this folder."""
