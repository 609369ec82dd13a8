"""Creation of containers over a bad connection to the engine."""

from collections.abc import AsyncIterator

import docker
import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory, container_lifetime
from ares_exp.errors import ContainerStartError
from tests.docker.conftest import exists
from tests.docker.engine_relay import EngineRelay

pytestmark = [pytest.mark.docker, pytest.mark.once]

SPEC = ContainerSpec("bad connection", docker_image="debian:bookworm-slim")


@pytest.fixture
async def relay(engine: docker.DockerClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineRelay]:
    async with EngineRelay() as relay:
        monkeypatch.setenv("DOCKER_HOST", relay.host)
        monkeypatch.setattr(container_lifetime, "APPEARS_WITHIN_SEC", 4 * relay.delay_sec)
        yield relay


async def test_container_without_creation_response_is_adopted(relay: EngineRelay, engine: docker.DockerClient) -> None:
    relay.responses_to_lose = 1
    async with DockerContainerFactory()(SPEC) as box:
        assert relay.created == 2
        assert (await box.exec("echo adopted")).output == "adopted\n"
        assert exists(engine, box.container_name)
    assert not exists(engine, box.container_name)


@pytest.mark.parametrize(("fault", "times"), [("responses_to_lose", 100), ("creates_to_delay", 2)])
async def test_creation_without_response_leaves_no_container(
    relay: EngineRelay, engine: docker.DockerClient, fault: str, times: int
) -> None:
    setattr(relay, fault, times)
    box = DockerContainerFactory()(SPEC)
    with pytest.raises(ContainerStartError, match="response to the creation of the container was lost"):
        await box.start()
    assert relay.created == 2
    assert not exists(engine, box.container_name)
