"""Nothing of a compose project outlives its run, however that ends."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.compose.container import ComposeContainer
from ares_exp.containers.docker.engine import connect
from ares_exp.containers.docker.leftovers import find, remove_stale
from tests.docker.compose_tasks import IMAGE, compose_spec, needs_compose, things
from tests.docker.runner import Runner
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


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(IMAGE, file=compose_spec(tmp_path, SERVICES).compose_file or "")
    with runner.process:
        yield runner
        runner.process.kill()


def test_killed_run_removes_its_project(runner: Runner, engine: docker.DockerClient) -> None:
    assert runner.line() == "up"
    assert len(things(engine, runner.name)) == 4
    os.killpg(runner.process.pid, signal.SIGKILL)
    assert wait_until(lambda: not things(engine, runner.name)), things(engine, runner.name)


@pytest.mark.nightly
def test_run_killed_during_start_removes_its_project(runner: Runner, engine: docker.DockerClient) -> None:
    assert wait_until(lambda: bool(things(engine, runner.name)))
    runner.process.kill()
    assert wait_until(lambda: not things(engine, runner.name)), things(engine, runner.name)


@pytest.mark.nightly
async def test_next_run_removes_stale_projects(runner: Runner, engine: docker.DockerClient) -> None:
    def found() -> list[tuple[str, bool]]:
        return [(one.kind, one.is_stale) for one in find(ours.api) if one.name.startswith(runner.name)]

    assert await asyncio.to_thread(runner.line) == "up"
    ours = await connect()
    assert sorted(found()) == [(kind, False) for kind in ("container", "container", "network", "volume")]
    threads = Path(f"/proc/{runner.process.pid}/task").iterdir()
    [undertaker] = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    os.kill(undertaker, signal.SIGKILL)
    runner.process.kill()
    runner.process.wait()
    # All of it, unless another user's run is next to this test.
    assert all(is_stale for _, is_stale in found())
    await asyncio.to_thread(remove_stale, ours)
    assert await asyncio.to_thread(wait_until, lambda: not things(engine, runner.name))


@pytest.mark.nightly  # the daily run has `test_killed_run_removes_its_project`
async def test_cancelled_start_leaves_no_containers(tmp_path: Path, engine: docker.DockerClient) -> None:
    box = DockerContainerFactory()(compose_spec(tmp_path, SERVICES))
    assert isinstance(box, ComposeContainer)
    start = asyncio.create_task(box.start())
    assert await asyncio.to_thread(wait_until, lambda: bool(things(engine, box.project_name)))
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert things(engine, box.project_name) == []
