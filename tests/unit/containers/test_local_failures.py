"""A local container on a host without a resource: a defined error, and nothing left. Also as an ordinary user."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ares_exp.containers.local.cgroup import usable_cgroup_paths
from ares_exp.containers.local.isolation import find_bwrap
from tests.unit.containers.local_containers import ROOT, STEADY_MOUNTS, needs_local

pytestmark = needs_local

FEW_DESCRIPTORS = """
import asyncio, gc, os, resource
from pathlib import Path
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import ContainerError

async def live():
    async with LocalContainerFactory()(ContainerSpec(name="x")) as container:
        return (await container.exec("echo on", timeout_sec=20)).output

def left():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path(f"/proc/self/task/{os.getpid()}/children").read_text()

async def main():
    await live()  # what is opened once and kept
    before, (soft, hard) = left(), resource.getrlimit(resource.RLIMIT_NOFILE)
    answers = []
    for spare in range(0, 40, 3):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + spare, hard))
        try:
            answers.append(await live())
        except ContainerError as error:
            answers.append(type(error).__name__)
            assert "Too many open files" in str(error), error
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert left() == before, (spare, left(), before)
    print(os.getpid())
    print(sorted({answer.strip() for answer in answers}))
    print(answers[-1], end="")

asyncio.run(main())
"""


def run(*command: str | os.PathLike[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDEVMODE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def groups_of(pid: str) -> list[Path]:
    """cgroups of a process's containers."""
    directories = {place.directory for place in usable_cgroup_paths().values()}
    return [group for directory in directories for group in directory.glob(f"ares_exp-box-{pid}-*")]


def test_out_of_file_descriptors(tmp_path: Path) -> None:
    tried = run(sys.executable, "-B", "-c", FEW_DESCRIPTORS, TMPDIR=str(tmp_path))
    assert tried.returncode == 0, tried.stderr
    pid, answers, last = tried.stdout.splitlines()
    assert "ContainerStartError" in answers
    assert last == "on", tried.stdout
    # A directory that took more descriptors to delete than there were goes with the process, a moment later.
    deadline = time.monotonic() + 20
    in_memory = Path("/dev/shm")
    while (
        left := [*tmp_path.iterdir(), *in_memory.glob(f"*-{pid}-*"), *groups_of(pid)]
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


NO_SPACE = """
import asyncio, os
from pathlib import Path
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import ContainerError

async def main():
    folder = Path(os.environ["TMPDIR"])
    async with LocalContainerFactory()(ContainerSpec(name="x")) as container:
        filler = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(filler, bytes(4096))
        except OSError as error:
            print(error.strerror)
        os.close(filler)
        print((await container.exec("echo on; head -c 5M /dev/zero >/tmp/x; stat -c %s /tmp/x", timeout_sec=20)).output)
        try:
            await LocalContainerFactory()(ContainerSpec(name="full")).start()
        except ContainerError as error:
            print(type(error).__name__, error)
    print([path.name for path in folder.iterdir()])

asyncio.run(main())
"""


@pytest.mark.root
def test_out_of_space_for_temporary_files(tmp_path: Path) -> None:
    small = [word for path in (tmp_path, "/dev/shm") for word in ("--size", str(2**20), "--tmpfs", path)]
    # In a process tree of its own, which ends with this one: nothing of it may be left on the host.
    tried = run(
        *(*STEADY_MOUNTS, find_bwrap(), "--dev-bind", "/", "/", *small, "--", sys.executable, "-B", "-c", NO_SPACE),
        TMPDIR=str(tmp_path),
    )
    lines = [line for line in tried.stdout.splitlines() if line]
    assert lines[:3] == ["No space left on device", "on", str(5 * 2**20)], tried.stdout + tried.stderr
    assert lines[3].startswith("ContainerStartError The local container of full did not start")
    assert "No space left on device" in lines[3]
    assert lines[4] == "['filler']"
