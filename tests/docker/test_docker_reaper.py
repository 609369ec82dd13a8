"""A process that is killed at a moment when its containers are made, and not tied to it yet, leaves nothing."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import docker
import pytest

from ares_exp.containers.docker import leftovers
from tests.docker.compose_tasks import IMAGE, things
from tests.docker.engine_relay import EngineRelay
from tests.docker.runner import Runner
from tests.leaks import processes, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.once]

HELD_WITHIN_SEC = 60.0


@pytest.fixture
async def relay() -> AsyncIterator[EngineRelay]:
    async with EngineRelay() as relay:
        yield relay


async def start(relay: EngineRelay, file: Path | str = "") -> Runner:
    """Starts a process over a relay, and waits until the relay holds its request."""
    runner = await asyncio.to_thread(lambda: Runner(IMAGE, file=file, host=relay.host))
    await asyncio.wait_for(relay.held.wait(), HELD_WITHIN_SEC)
    return runner


async def kill(runner: Runner) -> None:
    """Kills it with its process group, as a terminal or a scheduler would."""
    os.killpg(runner.process.pid, signal.SIGKILL)
    await asyncio.to_thread(runner.process.communicate)


def helpers(relay: EngineRelay) -> list[int]:
    found = []
    for pid in [pid for pid, _, _, words in processes() if leftovers.__name__ in words]:
        with suppress(OSError):  # the helper of another test may have just ended
            if f"DOCKER_HOST={relay.host}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


async def gone(engine: docker.DockerClient, name: str) -> bool:
    return await asyncio.to_thread(wait_until, lambda: not things(engine, name))


@pytest.mark.parametrize("moment", [b"/attach?", b"/start"])
async def test_runner_killed_before_the_start_is_cleaned_up(
    relay: EngineRelay, engine: docker.DockerClient, moment: bytes
) -> None:
    relay.holds = moment
    runner = await start(relay)
    [found] = await asyncio.to_thread(engine.api.containers, all=True, filters={"name": runner.name})
    assert found["State"] == "created"
    await kill(runner)
    assert await gone(engine, runner.name)


async def test_runner_killed_before_creation_is_cleaned_up(relay: EngineRelay, engine: docker.DockerClient) -> None:
    """It is created when its maker is dead already."""
    relay.holds = b"/containers/create"
    runner = await start(relay)
    assert not things(engine, runner.name)
    await kill(runner)

    def events() -> list[str]:
        found = engine.api.events(since=1, until=time.time() + 1, filters={"container": runner.name}, decode=True)
        return [event["Action"] for event in found]

    relay.released.set()
    assert await asyncio.to_thread(wait_until, lambda: events() == ["create", "destroy"]), events()


async def test_normal_end_leaves_no_helper(relay: EngineRelay, engine: docker.DockerClient) -> None:
    """It would start a Python, and ask the engine for seconds."""
    relay.holds = b"/start"
    runner = await start(relay)
    assert len(helpers(relay)) == 1
    relay.released.set()
    assert await asyncio.to_thread(runner.line) == "up"
    await asyncio.to_thread(runner.process.communicate)
    assert runner.process.returncode == 0
    assert helpers(relay) == []
    assert not things(engine, runner.name)
