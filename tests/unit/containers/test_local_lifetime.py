"""What is left of local containers when their runner dies. Runs as root and as an ordinary user."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp.containers.local.container_directory import ContainerDirectory, find, folders, remove_stale
from tests.leaks import CASES, IN_MEMORY, Phase, Run, processes, wait_until
from tests.unit.containers.local_containers import local_container, needs_local

pytestmark = [needs_local, pytest.mark.once]


def containers(run: Run) -> int:
    return len(run.box_directories())


def busy(run: Run) -> int:
    return sum(words.startswith(f"sleep {run.mark}") for _, _, _, words in processes()) // 2


def mounts(run: Run) -> list[str]:
    marks = (str(run.temporary), f"ares_exp-box-{run.process.pid}-")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if any(mark in line for mark in marks)]


def groups(run: Run) -> list[str]:
    """cgroups of a run's containers."""
    name = f"ares_exp-box-{run.process.pid}-"
    return [found for _, found, _ in os.walk("/sys/fs/cgroup") for found in found if found.startswith(name)]


def left(run: Run) -> list[str]:
    """All that is left of a run, on this machine and without asking anybody to clean up."""
    return [*run.processes(), *run.files(), *groups(run), *mounts(run)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run("local", tmp_path, containers, busy)
    yield run
    run.process.kill()
    run.process.wait()
    assert wait_until(lambda: not left(run))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("phase", "number"),
    [pytest.param(*case, marks=pytest.mark.nightly) if case[0] == "create" else case for case in CASES],
)
def test_ended_run_leaves_no_resources(run: Run, phase: Phase, number: signal.Signals) -> None:
    run.reach(phase)
    assert mounts(run) == []
    started = run.end(number)
    assert wait_until(lambda: not left(run)), left(run)
    print(f"nothing left {time.monotonic() - started:.2f} s after the end")


KILLED = """
import asyncio, os, signal
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory

async def main():
    async with LocalContainerFactory()(ContainerSpec(name="x")) as container:
        assert (await container.exec("mkdir -p /d/e; touch /d/e/f; chmod 0 /d/e; chmod 555 /d")).exit_code == 0
        print(container._directory.path, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_killed_run_leaves_no_closed_directory() -> None:
    words = [sys.executable, "-c", KILLED]
    killed = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    directory = Path(killed.stdout.strip())
    assert wait_until(lambda: not directory.exists())


def stale() -> list[str]:
    return [leftover.name for leftover in find() if leftover.is_stale]


async def test_cleanup_keeps_directories_of_running_processes() -> None:
    async with local_container() as container:
        assert container._directory is not None
        remove_stale()
        assert container._directory.path.is_dir()
        assert (await container.exec("echo on")).output == "on\n"
        await container.upload(__file__, "/x")


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One of the two where the directories of containers may lie, for once no other run's: that might sweep first."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as memory:
        monkeypatch.setattr("ares_exp.containers.local.container_directory._IN_MEMORY", Path(memory))
        yield folders()[request.param == "disk"]


def test_directory_with_free_lock_is_stale(folder: Path) -> None:
    directory = ContainerDirectory(folder)
    assert directory.path.parent == folder
    (directory.path / "x").write_text("x")
    assert str(directory.path) not in stale()
    os.close(directory._lock)
    directory._lock = -1
    assert str(directory.path) in stale()
    remove_stale()
    assert not directory.path.exists()
    directory.remove()
