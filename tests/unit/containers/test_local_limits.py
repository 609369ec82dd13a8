"""The limits of a local container, measured in it and in its cgroups; where it may have none, that it says so."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ares_exp.containers.container import ContainerSpec, ExecResult
from ares_exp.containers.local import LocalContainerFactory, container_process
from ares_exp.containers.local.cgroup import Controller, groups_of, oom_kills, usable_cgroup_paths
from ares_exp.containers.local.container import LocalContainer
from ares_exp.containers.local.container_process import _SERVE
from ares_exp.errors import ContainerDiedError, ContainerError
from tests.leaks import until
from tests.unit.containers.local_containers import local_container, needs_local

pytestmark = needs_local

Test = TypeVar("Test", bound=Callable[..., Any])

PIDS = 64
DEADLINE_SEC = 20.0


def limited_by(*controllers: Controller) -> Callable[[Test], Test]:
    missing = set(controllers) - set(usable_cgroup_paths())
    skip = pytest.mark.skipif(bool(missing), reason=f"root cannot create {' or '.join(missing)} cgroups here")
    return lambda test: pytest.mark.root(skip(test))


def small(pids_limit: int = PIDS, **spec: object) -> LocalContainer:
    return LocalContainerFactory(pids_limit=pids_limit)(ContainerSpec(name="small", **spec))  # type: ignore[arg-type]


def groups(container: LocalContainer) -> list[Path]:
    return groups_of(container._directory.path)


def setting(container: LocalContainer, *names: str) -> str:
    """What stands in the file that one version of the interface calls so, the other so."""
    return next((group / name).read_text() for group in groups(container) for name in names if (group / name).exists())


async def run(container: LocalContainer, command: str) -> ExecResult:
    return await container.exec(command, timeout_sec=DEADLINE_SEC)


async def until_dead(container: LocalContainer) -> None:
    """Runs a command again and again, to the error."""
    deadline = time.monotonic() + DEADLINE_SEC
    while time.monotonic() < deadline:
        await run(container, "true")


def test_warnings_name_exactly_the_unenforced_limits() -> None:
    spec = ContainerSpec(name="t", cpus=2, memory_mb=512, storage_mb=100)
    warnings = LocalContainerFactory().check(spec)
    needed = {"cpus=2": "cpu", "memory_mb=512": "memory", "storage_mb=100": "no controller for it"}
    expected = [limit for limit, controller in needed.items() if controller not in usable_cgroup_paths()]
    assert [warning.split(":")[0] for warning in warnings] == expected
    assert LocalContainerFactory().check(ContainerSpec(name="t")) == []


def test_groups_are_only_made_with_permission() -> None:
    written = [place for place in usable_cgroup_paths().values() if not os.access(place.directory, os.W_OK)]
    assert written == []


async def test_box_without_limits_has_no_groups() -> None:
    async with LocalContainer(ContainerSpec(name="free"), share_network=False) as container:
        assert groups(container) == []
        assert (await run(container, "echo on")).output == "on\n"


@limited_by("memory")
@pytest.mark.parametrize(
    "greedy", ["tail /dev/zero", "python3 -c 'x = bytearray(200 << 20)'", "head -c 200M /dev/zero | sort >/dev/null"]
)
async def test_command_above_the_memory_limit_is_killed(greedy: str) -> None:
    async with small(memory_mb=64) as container:
        assert container._directory is not None
        assert (await run(container, f"set -o pipefail; {greedy}")).exit_code == 137
        assert oom_kills(container._directory.path) > 0
        assert (await run(container, "echo on")).output == "on\n"


@limited_by("memory")
async def test_command_below_the_memory_limit_succeeds() -> None:
    async with small(memory_mb=64) as container:
        assert (await run(container, "head -c 30M /dev/zero >/tmp/x && stat -c %s /tmp/x")).output == "31457280\n"
        assert oom_kills(container._directory.path) == 0


@limited_by("memory")
async def test_files_count_as_memory() -> None:
    async with small(memory_mb=64) as container:
        written = await run(container, "exec dd if=/dev/zero of=/tmp/x bs=1M count=200")
        assert written.exit_code not in (0, None)
        used = int(setting(container, "memory.usage_in_bytes", "memory.current"))
        assert 32 * 2**20 < used <= 64 * 2**20


@limited_by("memory")
async def test_exhausted_memory_is_reported_as_the_cause() -> None:
    async with small(memory_mb=16) as container:
        with pytest.raises(ContainerDiedError, match="its memory, which also contains its files, was used up"):
            # The kernel chooses whom it ends: the first process, and not `head`, without which the box lives on.
            await run(container, "echo 1000 >/proc/1/oom_score_adj; head -c 60M /dev/zero >/tmp/x")


@limited_by("memory")
async def test_start_with_too_little_memory_fails() -> None:
    with pytest.raises(ContainerError, match="memory"):
        async with small(memory_mb=1) as container:  # what the first process has before it is limited, it keeps
            await run(container, "tail -c 8M /dev/zero")


@limited_by("cpu")
async def test_cpu_time_is_limited() -> None:
    async with small(cpus=0.05) as container:  # little, because on a busy machine a group gets little
        assert setting(container, "cpu.cfs_quota_us", "cpu.max").split()[0] == "5000"
        deadline = time.monotonic() + DEADLINE_SEC
        while throttled(container) == 0 and time.monotonic() < deadline:
            await run(container, "for i in 1 2 3 4; do timeout 0.5 sh -c 'while :; do :; done' & done; wait")
        assert throttled(container) > 0


def throttled(container: LocalContainer) -> int:
    """In how many periods it had to wait for the next one."""
    return int(dict(line.split() for line in setting(container, "cpu.stat").splitlines())["nr_throttled"])


@limited_by("pids")
async def test_fork_bomb_is_contained() -> None:
    script = """
import os, signal
children = []
try:
    while child := os.fork():
        children.append(child)
    signal.pause()
except OSError as error:
    print(len(children), error.strerror, flush=True)
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
    async with small() as container:
        result = await run(container, f"python3 - <<'EOF'\n{script}\nEOF")
        children, _, reason = result.output.partition(" ")
        assert reason == "Resource temporarily unavailable\n"
        assert 10 < int(children) < PIDS
        assert (await run(container, "ls -d /usr")).output == "/usr\n"


@limited_by("pids")
async def test_time_limit_kills_a_fork_bomb() -> None:
    async with small() as container:
        filled = await container.exec("while :; do sleep 600 & done", timeout_sec=2)
        assert filled.timed_out
        assert "Resource temporarily unavailable" in filled.output
        following = await run(container, "cat /proc/[0-9]*/stat | grep -c '(sleep) [^Z]'; echo next")
        assert following.output.endswith("0\nnext\n")


@limited_by("pids")
async def test_killed_processes_no_longer_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first process, stopped here, may reap them late. A later command could then not fork."""
    monkeypatch.setattr(container_process, "_REAP_SEC", 60.0)
    async with small() as container:
        await asyncio.gather(*(run(container, "sleep 0.1") for _ in range(3)))  # shells for the bomb and for its end
        bomb = asyncio.create_task(container.exec("while :; do sleep 600 & done", timeout_sec=2))
        await until(lambda: len(alive(container)) >= PIDS)
        first = container._process._namespaces()["child-pid"]
        os.kill(first, signal.SIGSTOP)
        try:
            await until(lambda: len(alive(container)) < PIDS // 2)
            await asyncio.sleep(0.5)
        finally:
            os.kill(first, signal.SIGCONT)
        assert (await bomb).timed_out
        assert not container._process._reserve.is_needed


def alive(container: LocalContainer) -> list[str]:
    """The processes of the container that have not ended."""
    return [pid for pid in setting(container, "cgroup.procs").split() if Path(f"/proc/{pid}/exe").exists()]


def test_restarted_first_process_reaps_zombies(tmp_path: Path) -> None:
    """It starts again if it cannot fork; processes that end meanwhile would use up the limit for ever."""
    (tmp_path / "serve").write_text(_SERVE.replace("CHANNELS", str(tmp_path)))
    end = "child = os.fork() or os._exit(0); os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)"
    script = f"import os, sys; {end}; os.execv('/bin/bash', ['bash', sys.argv[1]])"
    words = [sys.executable, "-c", script, tmp_path / "serve"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.stdin.close()


@limited_by("pids")
async def test_commands_run_while_all_processes_are_used() -> None:
    async with small() as container:
        await run(container, "(setsid bash -c 'while :; do sleep 600 & done' >/dev/null 2>&1 &)")
        async with asyncio.timeout(60):
            beside = [container.exec("(true); echo on", timeout_sec=3) for _ in range(4)]
            results = await asyncio.gather(*beside, return_exceptions=True)
        for result in results:
            assert isinstance(result, (ExecResult, ContainerError)), result
        async with asyncio.timeout(60):
            while not await frees(container):
                pass
        async with asyncio.timeout(DEADLINE_SEC):  # the room that new shells were given is taken back
            while setting(container, "pids.max") != f"{PIDS}\n":  # noqa: ASYNC110 (a timer does it)
                await asyncio.sleep(0.02)


async def frees(container: LocalContainer) -> bool:
    """Whether all else in the container could be killed, and a command runs again."""
    with contextlib.suppress(ContainerError):
        await container.exec("kill -9 -1", timeout_sec=3)
        return (await container.exec("echo next", timeout_sec=3)).output.endswith("next\n")
    return False


@limited_by("pids")
async def test_default_process_limit_reaches_the_group() -> None:
    async with local_container() as container:
        assert setting(container, "pids.max") == "4096\n"


@limited_by("pids", "memory", "cpu")
async def test_box_neither_sees_nor_changes_its_groups() -> None:
    async with small(memory_mb=64, cpus=1) as container:
        own = {line.split(":")[2] for line in (await run(container, "cat /proc/self/cgroup")).output.splitlines()}
        assert own == {"/"}
        name = container._directory.path.name
        seen = await run(container, "cat /proc/*/cgroup /proc/*/environ; ls -R /sys")
        assert name not in seen.output
        before = [path.read_text() for group in groups(container) for path in sorted(group.glob("*.max"))]
        for path in (f"{group}/{file}" for group in groups(container) for file in ("cgroup.procs", "pids.max")):
            assert (await run(container, f"echo max >{path}")).exit_code != 0
        assert (await run(container, "mount -t cgroup -o pids cg /mnt")).exit_code != 0
        assert before == [path.read_text() for group in groups(container) for path in sorted(group.glob("*.max"))]


@limited_by("pids", "memory", "cpu")
async def test_groups_share_name_and_lifetime_of_the_box() -> None:
    async with small(memory_mb=64, cpus=1) as container:
        made = groups(container)
        assert {group.name for group in made} == {container._directory.path.name}
        assert len(made) == len({place.directory for place in usable_cgroup_paths().values()})
        await container.exec("(setsid sleep 300 &)")
        assert all(len((group / "cgroup.procs").read_text().split()) > 2 for group in made)
    assert [group for group in made if group.exists()] == []


async def test_killed_first_process_is_reported() -> None:
    async with local_container() as container:
        bwrap = container._process._process.pid
        first = int(Path(f"/proc/{bwrap}/task/{bwrap}/children").read_text())
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ContainerDiedError, match="test has ended: it was killed by signal 9"):
            await until_dead(container)


async def test_transfer_from_killed_container_reports_its_end(tmp_path: Path) -> None:
    async with local_container() as container:
        slow = "printf '#!/bin/sh\ntouch /started; sleep 600\n' >/usr/local/bin/tar; chmod +x /usr/local/bin/tar"
        await container.exec(slow)
        copying = asyncio.create_task(container.download("/etc", tmp_path / "copy"))
        await container.exec("until [ -e /started ]; do sleep 0.02; done", timeout_sec=60)
        container._process._process.kill()
        with pytest.raises(ContainerDiedError, match="test has ended"):
            await asyncio.wait_for(copying, 60)
