"""Local containers on a host without bubblewrap or another resource."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ares_exp.containers.local.cgroup import usable_cgroup_paths
from ares_exp.containers.local.isolation import MINIMUM_VERSION, bwrap_arguments, find_bwrap
from ares_exp.errors import PreflightError
from tests.conftest import run_command
from tests.unit.containers.local_containers import ROOT, STEADY_MOUNTS, needs_local

pytestmark = needs_local


def found_with(program: Path, text: str, monkeypatch: pytest.MonkeyPatch, mode: int = 0o755) -> Path:
    """What is found where this program is the first `bwrap` in PATH."""
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(mode)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return find_bwrap.__wrapped__()


def test_bundled_bubblewrap_is_new_enough() -> None:
    version = subprocess.run([find_bwrap(), "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    assert tuple(int(part) for part in version.split()[1].split(".")[:2]) >= MINIMUM_VERSION


def test_newer_system_bubblewrap_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = tmp_path / "bwrap"
    assert found_with(newer, "echo bubblewrap 0.12.1", monkeypatch) == newer


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("echo bubblewrap 0.8.0", 0o755),
        ("echo bubblewrap 0.12.0", 0o4755),
        ("exit 1", 0o755),
        ("echo nonsense", 0o755),
        ("exec /no/such/program", 0o755),
    ],
)
def test_unusable_system_bubblewrap_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, mode: int
) -> None:
    usable = find_bwrap()
    assert found_with(tmp_path / "bwrap", text, monkeypatch, mode) == usable


def test_other_operating_system_is_refused_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(PreflightError, match=r"needs Linux .*, but this is darwin\. Use container=docker\."):
        find_bwrap.__wrapped__()


def words(*, share_network: bool = False, privileged: bool = True) -> list[str]:
    return bwrap_arguments(
        ["--symlink", "usr/bin", "/bin"],
        env={"A": "1"},
        channels=Path("/c"),
        share_network=share_network,
        privileged=privileged,
    )


def test_bubblewrap_arguments_isolate_the_box() -> None:
    closed = words()
    for word in (
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--new-session", "--die-with-parent"),
    ):
        assert word in closed
    assert closed[closed.index("--cap-drop") + 1] == "ALL"
    assert closed.index("--cap-drop") < closed.index("--cap-add")
    added = {closed[i + 1] for i, word in enumerate(closed) if word == "--cap-add"}
    assert not added & {f"CAP_{name}" for name in ("SYS_ADMIN", "MKNOD", "NET_ADMIN", "SYS_PTRACE", "NET_RAW")}
    assert not [word for word in closed if word.startswith("/sys")]
    assert closed.index("--proc") < closed.index("/proc/sys")


def test_network_and_users_are_shared_only_on_request() -> None:
    assert "--unshare-net" not in words(share_network=True)
    assert "--unshare-user" not in words()
    assert "--unshare-user" in words(privileged=False)


_PREFLIGHT = """
import asyncio, sys
from ares_exp.containers.local import LocalContainerFactory, container, host_factory
container.container_evidence = host_factory.container_evidence = lambda: None  # this machine may be a container
from ares_exp.errors import PreflightError
try:
    asyncio.run(LocalContainerFactory().preflight())
except PreflightError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.root
@pytest.mark.parametrize(
    "restriction",
    [
        ["--unshare-user", "--uid", "1234", "--gid", "1234", "--disable-userns"],
        ["--cap-drop", "ALL", "--unshare-user", "--disable-userns"],
    ],
)
def test_unusable_isolation_is_explained_with_remedy(restriction: list[str]) -> None:
    before = (*STEADY_MOUNTS, find_bwrap(), *restriction, "--dev-bind", "/", "/", "--")
    tried = run(*before, sys.executable, "-c", _PREFLIGHT)
    assert tried.returncode == 3, tried.stderr
    for part in ("container=local", "bwrap", "Run as root", "container=docker"):
        assert part in tried.stdout


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
    return run_command(tuple(map(str, command)), ROOT, {"PYTHONPATH": str(ROOT), "PYTHONDEVMODE": "1", **variables})


def groups_of(pid: str) -> list[Path]:
    """cgroups of a process's containers."""
    directories = {place.directory for place in usable_cgroup_paths().values()}
    return [group for directory in directories for group in directory.glob(f"ares_exp-box-{pid}-*")]


def test_exhausted_file_descriptors_are_a_start_error(tmp_path: Path) -> None:
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
def test_full_temporary_storage_is_reported(tmp_path: Path) -> None:
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
