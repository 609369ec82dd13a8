"""The reason that a stopped container reports."""

import asyncio
import gc
import uuid
from collections.abc import Awaitable, Callable

import docker
import pytest

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker import engine as engine_module
from ares_exp.containers.docker.container import DockerContainer
from ares_exp.containers.docker.container_lifetime import exit_reason
from ares_exp.errors import ContainerDiedError, ContainerLostError
from tests.docker.conftest import exists
from tests.docker.engine_relay import EngineRelay

pytestmark = [pytest.mark.docker, pytest.mark.once]

IMAGE = "debian:bookworm-slim"
SPEC = ContainerSpec("mortal", docker_image=IMAGE)
SOON_SEC = 60.0
MOST_LOGGED_EVENTS = 256


async def last_words(box: Container, command: str = "true", kind: type[ContainerDiedError] = ContainerDiedError) -> str:
    """What a container says whose end is near."""
    async with asyncio.timeout(SOON_SEC):
        while True:
            try:
                await box.exec(command)
            except ContainerDiedError as error:
                return str(error) if type(error) is kind else f"{type(error).__name__}: {error}"


async def gone(engine: docker.DockerClient, name: str) -> None:
    async with asyncio.timeout(SOON_SEC):
        while exists(engine, name):  # noqa: ASYNC110 - it happens in the engine
            await asyncio.sleep(0.02)


async def test_exhausted_memory_is_reported() -> None:
    async with DockerContainerFactory()(ContainerSpec("greedy", docker_image=IMAGE, memory_mb=32)) as box:
        said = await last_words(box, "echo 1000 > /proc/1/oom_score_adj; tail /dev/zero")
    assert said == "The container of greedy was killed for using more memory than its limit (memory_mb)."


async def test_command_over_the_memory_limit_is_killed() -> None:
    async with DockerContainerFactory()(ContainerSpec("small", docker_image=IMAGE, memory_mb=64)) as box:
        assert (await box.exec("tail /dev/zero", timeout_sec=60)).exit_code == 137
        assert (await box.exec("echo next")).output == "next\n"


async def test_exit_code_is_reported(engine: docker.DockerClient) -> None:
    entrypoint = '["sh", "-c", "until [ -e /go ]; do sleep 0.02; done; echo I serve nobody; exit 3"]'
    image = f"ares-exp-test:{uuid.uuid4().hex}"
    model = engine.containers.create(IMAGE)
    try:
        model.commit(*image.split(":"), changes=f"ENTRYPOINT {entrypoint}")
    finally:
        model.remove(force=True)
    try:
        async with DockerContainerFactory()(ContainerSpec("server", docker_image=image)) as box:
            said = await last_words(box, "touch /go")  # whose own answer may be lost in the end of the box
    finally:
        engine.images.remove(image, force=True)
    assert said.startswith("The container of server ended with exit code 3. Its first process")
    assert said.endswith("I serve nobody")


@pytest.mark.parametrize("how", ["kill", "remove"])
async def test_external_end_is_reported(engine: docker.DockerClient, how: str) -> None:
    async with DockerContainerFactory()(SPEC) as box:
        running = asyncio.create_task(box.exec("sleep 100"))
        await box.exec("true")
        peer = engine.containers.get(box.container_name)
        await asyncio.to_thread(peer.kill if how == "kill" else lambda: peer.remove(force=True))
        with pytest.raises(ContainerLostError, match="was killed from outside by signal 9"):
            await asyncio.wait_for(running, SOON_SEC)
        with pytest.raises(ContainerLostError, match="was killed from outside by signal 9"):
            await box.exec("true")
        with pytest.raises(ContainerLostError, match="was killed from outside by signal 9"):
            await box.download("/etc/hostname", "/nonexistent/x")


async def test_reason_outlives_the_engine_events(engine: docker.DockerClient) -> None:
    async with DockerContainerFactory()(SPEC) as box, DockerContainerFactory()(SPEC) as other:
        await asyncio.to_thread(engine.api.kill, box.container_name)
        await gone(engine, box.container_name)

        def talk() -> None:
            for _ in range(MOST_LOGGED_EVENTS):
                engine.api.exec_create(other.container_name, ["true"])

        await asyncio.to_thread(talk)
        said = await last_words(box, kind=ContainerLostError)
        assert said.startswith("The container of mortal was killed from outside by signal 9")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # docker-py drops a socket that it could not connect
async def test_stopped_engine_is_unreachable(monkeypatch: pytest.MonkeyPatch, engine: docker.DockerClient) -> None:
    async with EngineRelay() as relay:
        monkeypatch.setenv("DOCKER_HOST", relay.host)
        async with DockerContainerFactory()(SPEC) as box:
            await relay.close()
            said = await last_words(box, kind=ContainerLostError)
            assert said.startswith(
                f"The container of mortal cannot be reached: the engine at {relay.host} does not respond"
            )
        await gone(engine, box.container_name)  # our end of its stdin was lost
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # as above
async def test_container_of_a_stopping_engine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with EngineRelay() as relay:
        monkeypatch.setenv("DOCKER_HOST", relay.host)
        async with DockerContainerFactory()(SPEC) as box:
            await relay.stop_accepting()
            with pytest.raises(ContainerLostError, match=f"be reached. The engine at {relay.host} does not respond"):
                await box.exec("true", user="nobody")  # needs a new connection
    gc.collect()


@pytest.mark.parametrize(("cuts", "call"), [
    ((b"/archive?", 0), lambda box: box.upload(__file__, "/x")),
    ((b"/archive?", 0), lambda box: box.download("/usr/bin", "/nonexistent/x")),
    ((b"/archive?", 4096), lambda box: box.download("/usr/bin", "/nonexistent/x")),
    ((b"/exec", 0), lambda box: box.exec("true", user="nobody")),
], ids=["upload", "download", "during a download", "shell"])  # fmt: skip
async def test_broken_connection_is_a_lost_container(
    monkeypatch: pytest.MonkeyPatch, cuts: tuple[bytes, int], call: Callable[[DockerContainer], Awaitable[object]]
) -> None:
    async with EngineRelay() as relay:
        monkeypatch.setenv("DOCKER_HOST", relay.host)
        async with DockerContainerFactory()(SPEC) as box:
            relay.cuts = cuts
            with pytest.raises(ContainerLostError, match=r"cannot be reached: the engine at .* broke the connection"):
                await call(box)
            relay.cuts = None
            assert (await box.exec("echo next")).output == "next\n"


async def test_cut_connections_are_a_lost_container(monkeypatch: pytest.MonkeyPatch) -> None:
    async with EngineRelay() as relay:
        monkeypatch.setenv("DOCKER_HOST", relay.host)
        async with DockerContainerFactory()(SPEC) as box:
            relay.cut_all()  # the container loses its stdin
            said = await last_words(box, kind=ContainerLostError)
    assert said.startswith(f"The container of mortal cannot be reached: the engine at {relay.host} ")


async def test_hanging_engine_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with EngineRelay() as relay:
        monkeypatch.setenv("DOCKER_HOST", relay.host)
        async with DockerContainerFactory()(SPEC) as box:
            seen_by_us = await engine_module.connect()
            assert await asyncio.to_thread(exit_reason, seen_by_us, box.container_name) is None
            relay.hangs = True
            monkeypatch.setattr(engine_module, "INQUIRY_TIMEOUT_SEC", 0.3)
            said = await asyncio.to_thread(exit_reason, seen_by_us, box.container_name)
            relay.hangs = False
        assert f"cannot be reached: the engine at {relay.host} hangs" in said.clause
        assert said.is_outside
