"""What is left of a local box when its runner dies. Runs as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.box_directory import BoxDirectory, remove_stale
from ares_exp.errors import ContainerDiedError
from tests.unit.containers.local_sandbox import ROOT, box, needs_local

pytestmark = needs_local

RUNNER = """
import asyncio, sys
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory

async def main():
    boxes = [LocalContainerFactory()(ContainerSpec(name=str(n))) for n in range(3)]
    await asyncio.gather(*(box.start() for box in boxes))
    marks = [box.exec(f"(setsid sleep {sys.argv[1]} >/dev/null 2>&1 &); trap '' TERM INT HUP; echo") for box in boxes]
    await asyncio.gather(*marks)
    running = asyncio.gather(*(box.exec(f"sleep {sys.argv[1]}") for box in boxes))
    await asyncio.sleep(0.1)
    print("up", flush=True)
    try:
        await running
    finally:
        await asyncio.gather(*(box.stop() for box in boxes))

asyncio.run(main())
"""


def sleepers(mark: str) -> list[str]:
    """Processes of the host, those of boxes included, that sleep for `mark`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", mark.encode()]:
            found.append(entry.name)
    return found


def box_directories(pid: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"*ares_exp-box-{pid}-*"))


@pytest.fixture
def runner() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with three boxes in which commands and daemons run, and the number of seconds they sleep."""
    mark = f"{os.getpid()}{time.monotonic_ns() % 10**6:06}"
    process = subprocess.Popen(
        [sys.executable, "-B", "-c", RUNNER, mark],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert len(sleepers(mark)) == 6
        yield process, mark
        process.kill()


def wait_until_gone(mark: str, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while (left := sleepers(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


async def test_kill_9(runner: tuple[subprocess.Popen[str], str]) -> None:
    process, mark = runner
    process.kill()
    assert wait_until_gone(mark, 1.0) == []
    process.wait(5)  # its boxes end with its stdin pipes, a moment before the kernel has let go of its locks
    assert len(box_directories(process.pid)) == 3
    await LocalContainerFactory().preflight()
    assert box_directories(process.pid) == []


def test_ctrl_c(runner: tuple[subprocess.Popen[str], str]) -> None:
    process, mark = runner
    process.send_signal(signal.SIGINT)
    process.wait(5)
    assert sleepers(mark) == []
    assert box_directories(process.pid) == []


def test_sigterm_unhandled(runner: tuple[subprocess.Popen[str], str]) -> None:
    process, mark = runner
    process.terminate()
    assert wait_until_gone(mark, 1.0) == []


async def test_a_sweep_spares_the_living() -> None:
    async with box() as container:
        assert remove_stale() == [] or container is not None
        assert (await container.exec("echo on")).output == "on\n"
        await container.upload(__file__, "/x")


def test_a_directory_is_stale_when_its_lock_is_free() -> None:
    directory = BoxDirectory()
    (directory.path / "x").write_text("x")
    assert directory.path not in remove_stale()
    os.close(directory._lock)
    directory._lock = -1
    assert directory.path in remove_stale()
    assert not directory.path.exists()
    directory.remove()


async def test_the_box_dies_with_its_bubblewrap() -> None:
    async with box() as container:
        await container.exec("(setsid sleep 300 &)")
        assert container._box is not None
        container._box._process.kill()
        await asyncio.wait_for(container._box._exited.wait(), 2)
        with pytest.raises(ContainerDiedError):
            await container.exec("true")
