"""A process that is killed at a moment when its containers are made, and not tied to it yet, leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import docker
import pytest

from ares_exp.containers.docker import reaper
from tests.docker.compose_tasks import IMAGE, compose_spec, needs_compose, things
from tests.docker.engine_relay import EngineRelay
from tests.leaks import processes, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.once]

HELD_WITHIN_SEC = 60.0

RUNNER = """
import asyncio, sys
from pathlib import Path
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory

async def main():
    image, file = sys.argv[1], Path(sys.argv[2]) if sys.argv[2:] else None
    box = DockerContainerFactory()(ContainerSpec("killed", docker_image=image, compose_file=file))
    print(box.project_name if file else box.container_name, flush=True)
    async with box:
        print((await box.exec("echo on")).output, end="", flush=True)

asyncio.run(main())
"""


@pytest.fixture
async def relay() -> AsyncIterator[EngineRelay]:
    async with EngineRelay() as relay:
        yield relay


class Runner:
    """A process that starts a container over a relay, which stops it where it is to be killed."""

    def __init__(self, relay: EngineRelay, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, IMAGE, *map(str, arguments)],
            env={**os.environ, "DOCKER_HOST": relay.host},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._relay = relay

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def stopped(self) -> None:
        await asyncio.wait_for(self._relay.held.wait(), HELD_WITHIN_SEC)

    async def kill(self) -> float:
        """Kills it with its process group, as a terminal or a scheduler would; returns when."""
        os.killpg(self.process.pid, signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return time.monotonic()


def helpers(relay: EngineRelay) -> list[int]:
    """The helper processes for this engine's address."""
    found = [pid for pid, _, _, words in processes() if reaper.__name__ in words]
    return [pid for pid in found if f"DOCKER_HOST={relay.host}".encode() in Path(f"/proc/{pid}/environ").read_bytes()]


async def gone(engine: docker.DockerClient, name: str) -> bool:
    return await asyncio.to_thread(wait_until, lambda: not things(engine, name))


@pytest.mark.parametrize("moment", [b"/attach?", b"/start"])
async def test_between_creation_and_start(relay: EngineRelay, engine: docker.DockerClient, moment: bytes) -> None:
    relay.holds = moment
    runner = Runner(relay)
    name = await runner.line()
    await runner.stopped()
    [found] = await asyncio.to_thread(engine.api.containers, all=True, filters={"name": name})
    assert found["State"] == "created"
    killed = await runner.kill()
    assert await gone(engine, name)
    print(f"gone {time.monotonic() - killed:.2f} s after the kill")


async def test_before_the_engine_has_the_request(relay: EngineRelay, engine: docker.DockerClient) -> None:
    """It is created when its maker is dead already."""
    relay.holds = b"/containers/create"
    runner = Runner(relay)
    name = await runner.line()
    await runner.stopped()
    assert not things(engine, name)
    killed = await runner.kill()

    def events() -> list[str]:
        found = engine.api.events(since=1, until=time.time() + 1, filters={"container": name}, decode=True)
        return [event["Action"] for event in found]

    relay.released.set()
    assert await asyncio.to_thread(wait_until, lambda: events() == ["create", "destroy"]), events()
    print(f"created and gone {time.monotonic() - killed:.2f} s after the kill")


@needs_compose
@pytest.mark.nightly
async def test_a_compose_project(relay: EngineRelay, engine: docker.DockerClient, tmp_path: Path) -> None:
    relay.holds = b"/start"
    services = f"  web: {{image: '{IMAGE}', command: sleep 1000, volumes: ['kept:/kept']}}\nvolumes: {{kept: }}\n"
    runner = Runner(relay, compose_spec(tmp_path, services).compose_file)
    project = await runner.line()
    await runner.stopped()
    assert len(things(engine, project)) >= 3
    killed = await runner.kill()
    assert await gone(engine, project)
    print(f"gone {time.monotonic() - killed:.2f} s after the kill")


async def test_an_end_in_order_has_no_helper_at_work(relay: EngineRelay, engine: docker.DockerClient) -> None:
    """It would start a Python, and ask the engine for seconds."""
    relay.holds = b"/start"
    runner = Runner(relay)
    name = await runner.line()
    await runner.stopped()
    assert len(helpers(relay)) == 1
    relay.released.set()
    assert await runner.line() == "on"
    assert await asyncio.to_thread(runner.process.wait) == 0
    assert runner.process.stdout is not None
    runner.process.stdout.close()
    assert helpers(relay) == []
    assert not things(engine, name)
