"""Nothing of a compose project outlives its run, however that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.compose.container import ComposeContainer
from ares_exp.containers.docker.engine import connect
from ares_exp.containers.docker.leftovers import find, remove_stale
from tests.docker.compose_tasks import IMAGE, compose_spec, needs_compose, things
from tests.leaks import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.once, needs_compose]

SERVICES = f"""
  web:
    image: {IMAGE}
    command: sleep 1000
    restart: always
    volumes: ["kept:/kept"]
volumes: {{kept: }}
"""

RUNNER = """
import asyncio, sys
from pathlib import Path
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory

async def main():
    file = Path(sys.argv[1])
    spec = ContainerSpec("composed", docker_image=sys.argv[2], compose_file=file)
    box = DockerContainerFactory()(spec)
    print(box.project_name, flush=True)
    async with box:
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


class Runner:
    """A process with a compose project."""

    def __init__(self, folder: Path) -> None:
        file = compose_spec(folder, SERVICES).compose_file
        words = [sys.executable, "-c", RUNNER, str(file), IMAGE]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.project = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def undertaker(self) -> int:
        """Its process number: that of the only child that is left when the project is up."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        (child,) = (int(pid) for thread in threads for pid in (thread / "children").read_text().split())
        return child


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    with runner.process:
        yield runner
        runner.process.kill()


def test_kill_9(runner: Runner, engine: docker.DockerClient) -> None:
    assert runner.line() == "up"
    assert len(things(engine, runner.project)) == 4
    os.killpg(runner.process.pid, signal.SIGKILL)
    assert wait_until(lambda: not things(engine, runner.project)), things(engine, runner.project)


@pytest.mark.nightly
def test_kill_9_in_the_middle_of_the_start(runner: Runner, engine: docker.DockerClient) -> None:
    assert wait_until(lambda: bool(things(engine, runner.project)))
    runner.process.kill()
    assert wait_until(lambda: not things(engine, runner.project)), things(engine, runner.project)


@pytest.mark.nightly
async def test_the_next_run_removes_what_nobody_did(runner: Runner, engine: docker.DockerClient) -> None:
    def found() -> list[tuple[str, bool]]:
        return [(one.kind, one.is_stale) for one in find(ours.api) if one.name.startswith(runner.project)]

    assert await asyncio.to_thread(runner.line) == "up"
    ours = await connect()
    assert sorted(found()) == [(kind, False) for kind in ("container", "container", "network", "volume")]
    os.kill(runner.undertaker(), signal.SIGKILL)
    runner.process.kill()
    runner.process.wait()
    # All of it, unless the next run is somebody else's, beside this test.
    assert all(is_stale for _, is_stale in found())
    await asyncio.to_thread(remove_stale, ours)
    assert await asyncio.to_thread(wait_until, lambda: not things(engine, runner.project))


@pytest.mark.nightly  # by day, `test_kill_9`
async def test_a_start_that_is_cancelled(tmp_path: Path, engine: docker.DockerClient) -> None:
    box = DockerContainerFactory()(compose_spec(tmp_path, SERVICES))
    assert isinstance(box, ComposeContainer)
    start = asyncio.create_task(box.start())
    assert await asyncio.to_thread(wait_until, lambda: bool(things(engine, box.project_name)))
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert things(engine, box.project_name) == []
