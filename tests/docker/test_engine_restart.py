"""An engine that dies, hangs, comes back, or has a full disk, while containers are used."""

import asyncio
import gc
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker import container_lifetime as life
from ares_exp.containers.docker.container import DockerContainer
from ares_exp.containers.docker.container_lifetime import ExitReason, exit_reason
from ares_exp.containers.docker.engine import connect
from ares_exp.errors import ContainerDiedError, ContainerError, ContainerLostError, TransferError
from ares_exp.runs.control.status import read_status
from tests.docker.private_engine import IMAGE, PrivateEngine
from tests.e2e.counting_endpoint import SUBMIT
from tests.e2e.killed_run import make_tasks
from tests.leaks import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.once, pytest.mark.timeout(300)]

SPEC = ContainerSpec("private", docker_image=IMAGE)
BOUND_SEC = 60.0
"""For a machine many times slower than one on which it takes a moment."""

NO_SOCKETS_OF_DOCKER_PY = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""docker-py leaves it to the garbage collector to close a socket that finds no engine."""


@pytest.fixture
def engine(private_engine: PrivateEngine) -> Iterator[PrivateEngine]:
    """There is nothing on it at the end of the test."""
    yield private_engine
    gc.collect()
    assert left(private_engine) == []


@pytest.fixture
async def box(engine: PrivateEngine) -> AsyncIterator[DockerContainer]:
    async with DockerContainerFactory()(SPEC) as box:
        yield box


def left(engine: PrivateEngine) -> list[str]:
    """Names: after a crash, engines may keep listing a dead container without a name."""
    with engine.client() as client:
        return [name for one in client.api.containers(all=True) for name in one["Names"]]


async def in_time(work: Awaitable[object]) -> None:
    async with asyncio.timeout(BOUND_SEC):
        await work


@NO_SOCKETS_OF_DOCKER_PY
async def test_restarted_engine_leaves_no_objects(engine: PrivateEngine, tmp_path: Path) -> None:
    boxes = [DockerContainerFactory()(SPEC) for _ in range(4)]
    await asyncio.gather(*(box.start() for box in boxes))
    running = [asyncio.create_task(box.exec("echo on; sleep 600")) for box in boxes]
    await asyncio.gather(*(box.exec("true") for box in boxes))
    engine.kill()
    try:
        for task in running:
            with pytest.raises(ContainerLostError, match=r"engine at .* does not respond"):
                await in_time(task)
        with pytest.raises(ContainerLostError, match=r"engine at .* does not respond"):
            await in_time(boxes[0].exec("true"))
        with pytest.raises(ContainerDiedError):
            await in_time(boxes[0].upload(__file__, "/x"))
        with pytest.raises(ContainerDiedError):
            await in_time(boxes[0].download("/etc/passwd", tmp_path / "x"))
        await in_time(asyncio.gather(*(box.stop() for box in boxes[:3])))
        await in_time(boxes[0].stop())
    finally:
        engine.start()
    with pytest.raises(ContainerLostError, match="The container of private"):
        await in_time(boxes[3].exec("true"))
    await boxes[3].stop()
    await DockerContainerFactory().preflight()
    assert left(engine) == []
    async with DockerContainerFactory()(SPEC) as box:
        assert (await box.exec("echo new")).output == "new\n"


def test_run_pauses_while_its_engine_is_stopped(engine: PrivateEngine, tmp_path: Path) -> None:
    make_tasks(tmp_path, ("",))
    for file in ("task.toml", "tests/test.sh"):
        path = tmp_path / "tasks" / "task-0" / file
        path.write_text(path.read_text().replace("debian:bookworm-slim", IMAGE).replace("/bin/sh", "/usr/bin/sh"))
    words = "env.path=tasks container=docker policy=scripted attempts=12 concurrency=2 tracker=none hydra.run.dir=run"
    command = [sys.executable, "-m", "ares_exp", *words.split(), f"policy.replies=['```bash\nsleep 2\n```','{SUBMIT}']"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        try:
            rows = tmp_path / "run" / "episodes.jsonl"
            assert wait_until(lambda: rows.exists() and rows.read_text(), BOUND_SEC)
            engine.stop()
            status = tmp_path / "run" / "status.json"
            assert wait_until(lambda: (now := read_status(status)) is not None and now.outage, BOUND_SEC)
            engine.start()
            out, _ = run.communicate(timeout=2 * BOUND_SEC)
        finally:
            run.kill()
    lost = [row for row in map(json.loads, rows.read_text().splitlines()) if row["reward"] is None]
    assert len(lost) <= 4, out  # of each slot: what ran, and what started on the engine that was ending
    assert {row["outcome"] for row in lost} <= {"container_error"}, out
    assert "12 of 12 episodes finished" in out
    assert not lost or "ares-exp resume=run 'resume_redo=[container_error]'" in out


async def test_engine_restart_is_an_external_end(engine: PrivateEngine) -> None:
    async with DockerContainerFactory()(SPEC) as box:
        engine.stop()
        engine.start()
        found = await asyncio.to_thread(exit_reason, await connect(), box.container_name)
    assert found == ExitReason("is gone: its engine was restarted", is_outside=True)


async def test_stop_does_not_wait_for_a_hanging_engine(engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "REMOVAL_SEC", 2.0)
    box = DockerContainerFactory()(SPEC)
    await box.start()
    engine.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        await in_time(box.stop())
        print(f"stop: {time.monotonic() - started:.1f} s")
    finally:
        engine.signal(signal.SIGCONT)
    assert wait_until(lambda: not left(engine))  # it continues with the requested removal


async def test_full_disk_is_reported(box: DockerContainer, tmp_path: Path) -> None:
    assert (await box.exec("cat /dev/zero > /big", timeout_sec=BOUND_SEC)).output.endswith("No space left on device\n")
    result = await box.exec("echo on; echo more > /small")
    assert result.output.startswith("on\n")
    assert "No space left on device" in result.output
    (tmp_path / "file").write_bytes(b"x" * 10**6)
    with pytest.raises(TransferError, match=r"(?i)no space left on device"):
        await in_time(box.upload(tmp_path / "file", "/file"))
    with pytest.raises(ContainerError, match=r"(?i)no space left on device"):
        await in_time(DockerContainerFactory()(SPEC).start())
    assert (await box.exec("rm /big; echo next")).output == "next\n"
    await box.upload(tmp_path / "file", "/file")
    assert (await box.exec("stat -c %s /file")).output == "1000000\n"
