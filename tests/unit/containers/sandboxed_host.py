"""Tests of `container=host`. They change the machine, so `test_host_container` runs each class in a sandbox."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ares_exp.containers.container import Container, ContainerFactory, ContainerSpec, Mount
from ares_exp.containers.local.container_directory import remove_stale
from ares_exp.containers.local.guardian import MADE, MARK
from ares_exp.containers.local.host_factory import HostContainerFactory
from ares_exp.errors import ContainerDiedError, ContainerStartError
from ares_exp.testing.container_contract import ContainerContract
from ares_exp.testing.forwarded_port_contract import ForwardedPortContract
from tests.conftest import ROOT, Cli
from tests.unit.containers.host_sandbox import is_sandbox

assert is_sandbox(), "These tests change the machine: run them by test_host_container.py."

PATHS = ("/app", "/tests", "/solution", "/logs")
_HOLD = """
import asyncio, sys
from pathlib import Path
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local.host_factory import HostContainerFactory

async def main():
    spec = ContainerSpec("held", context_dir=Path(sys.argv[1]), directories=("/tests", "/logs"))
    async with HostContainerFactory()(spec) as box:
        await box.exec("echo text >/logs/file; (setsid sleep 4401 &) & env -i setsid sleep 4402 &")
        print("held", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def left() -> list[str]:
    return [path for path in PATHS if os.path.lexists(path)]


def running(*commands: str) -> list[str]:
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [command for command in commands if command in lines]


async def until_running(*commands: str) -> None:
    async with asyncio.timeout(20):
        while running(*commands) != list(commands):  # noqa: ASYNC110 (other processes do it)
            await asyncio.sleep(0.05)


async def until_clean(*commands: str) -> None:
    async with asyncio.timeout(20):
        while left() or running(*commands):  # noqa: ASYNC110 (other processes do it)
            await asyncio.sleep(0.05)


@pytest.fixture
def context(tmp_path: Path) -> Path:
    context = tmp_path / "environment"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM any\nRUN mkdir /app\nWORKDIR /app\nCOPY data.csv /app/\n")
    (context / "data.csv").write_text("1\n")
    return context


class TestHostContract(ContainerContract):
    networks = frozenset({"public"})

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return HostContainerFactory()


class TestHostForwardedPorts(ForwardedPortContract):
    networks = frozenset({"public"})
    own_network = False

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return HostContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("forwarded_ports")


class TestHostPaths:
    async def test_files_are_in_real_paths_and_removed(self, context: Path, tmp_path: Path) -> None:
        tool = tmp_path / "tool"
        tool.mkdir()
        (tool / "run").write_text("text")
        Path("/tests").mkdir()  # empty, and not ours to remove
        mounts = (Mount(tool, "/opt/tool", "d"),)
        spec = ContainerSpec("paths", context_dir=context, directories=("/tests", "/logs"), mounts=mounts)
        async with HostContainerFactory()(spec) as box:
            assert (await box.exec("cat data.csv; cat /opt/tool/run")).output == "1\ntext"
            await box.upload(tool, "/tests")
            await box.upload(tool / "run", "/usr/local/bin/uploaded")
            await box.exec("mkdir -p /logs/verifier; rm -r /app; mkdir -p /app/new")
            assert Path("/tests/run").read_text() == "text"
            uploaded = Path("/usr/local/bin/uploaded").lstat()
            [made] = Path("/tmp").glob(f"ares_exp-box-*/{MADE}")
            records = {line["path"]: line["id"] for line in map(json.loads, made.read_text().splitlines())}
            assert records["/usr/local/bin/uploaded"] == [uploaded.st_dev, uploaded.st_ino]
        assert left() == ["/tests"]
        assert list(Path("/tests").iterdir()) == []
        assert not Path("/opt/tool").exists()
        assert not Path("/usr/local/bin/uploaded").exists()
        Path("/tests").rmdir()

    async def test_second_container_is_refused_while_one_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ares_exp.containers.local.host_factory._LOCK_SEC", 0.2)
        async with HostContainerFactory()(ContainerSpec("one")):
            with pytest.raises(ContainerStartError, match="only one can run at a time"):
                await HostContainerFactory()(ContainerSpec("two")).start()
        async with HostContainerFactory()(ContainerSpec("three")):
            pass

    async def test_stop_kills_daemons_and_stopped_processes(self) -> None:
        sleeps = tuple(f"sleep {number}" for number in range(4411, 4416))
        async with HostContainerFactory()(ContainerSpec("t")) as box:
            await box.exec("(setsid sleep 4411 &) & env -i setsid sleep 4412 & sleep 4413 &")
            await box.exec("( (setsid nohup sleep 4414 >/dev/null 2>&1 &) & )")
            await box.exec("setsid sleep 4415 &", user="nobody")
            await until_running(*sleeps)
            await box.exec("pkill -STOP -x -f 'sleep 4413'")
        assert running(*sleeps) == []

    async def test_terminal_has_a_shell(self) -> None:
        async with HostContainerFactory()(ContainerSpec("t")) as box:
            terminal = await box.open_terminal(columns=80, lines=24)
            try:
                await terminal.write(b"echo a$((1 + 1))b\n")
                seen = b""
                async with asyncio.timeout(20):
                    while b"a2b" not in seen:
                        seen += await terminal.read()
            finally:
                await terminal.close()


class TestHostKilled:
    @contextlib.asynccontextmanager
    async def held(self, context: Path) -> AsyncIterator[asyncio.subprocess.Process]:
        """A process with a container that it uses until it is killed."""
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _HOLD, context), stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(60):
                assert await holder.stdout.readline() == b"held\n"
            assert left() == ["/app", "/tests", "/logs"]
            await until_running("sleep 4401", "sleep 4402")
            yield holder
        finally:
            with contextlib.suppress(ProcessLookupError):
                holder.kill()
            await holder.wait()

    async def test_killed_run_leaves_no_resources(self, context: Path) -> None:
        async with self.held(context) as holder:
            holder.kill()
            await until_clean("sleep 4401", "sleep 4402")

    async def test_next_run_cleans_up_after_killed_guardian(self, context: Path) -> None:
        async with self.held(context) as holder:
            [directory] = Path("/tmp").glob(f"ares_exp-box-*/{MADE}")
            guardian = _guardian_of(directory.parent)
            os.kill(guardian, signal.SIGKILL)
            holder.kill()
            await holder.wait()
            assert left() == ["/app", "/tests", "/logs"]
            remove_stale()
            assert left() == []
            assert running("sleep 4401") == []
            assert not list(Path("/tmp").glob("ares_exp-box-*"))

    async def test_container_without_its_guardian_is_dead(self, context: Path) -> None:
        async with HostContainerFactory()(ContainerSpec("t")) as box:
            await box.exec("setsid sleep 4421 &")
            await until_running("sleep 4421")
            [directory] = Path("/tmp").glob(f"ares_exp-box-*/{MADE}")
            os.kill(_guardian_of(directory.parent), signal.SIGKILL)
            async with asyncio.timeout(20):
                with pytest.raises(ContainerDiedError):
                    await _run_until_error(box)
        assert running("sleep 4421") == []


async def _run_until_error(box: Container) -> None:
    while True:
        await box.exec("true")


def _guardian_of(directory: Path) -> int:
    found = [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and b"guardian.py\0%s\0" % os.fsencode(directory) in (path / "cmdline").read_bytes()
    ]
    assert len(found) == 1
    assert f"{MARK}={directory.name}".encode() in Path(f"/proc/{found[0]}/environ").read_bytes()
    return found[0]


class TestHostRuns:
    def test_bundled_tasks_are_solved_one_at_a_time(self, cli: Cli, tmp_path: Path) -> None:
        done = cli("container=host", "tracker=none", "concurrency=2")
        assert done.returncode == 0, done.stderr
        assert "6 of 6 episodes finished" in done.stdout
        assert "mean reward 1.00" in done.stdout
        assert "supports at most concurrency=1 on this machine, so concurrency=2 has no effect" in done.stderr
        assert left() == []

    def test_occupied_path_is_refused_before_the_first_episode(self, cli: Cli) -> None:
        Path("/app").mkdir()
        Path("/app/mine").touch()
        done = cli("container=host", "tracker=none", "env.tasks=write-greeting")
        assert done.returncode == 2
        assert "/app exists and is not an empty directory" in done.stderr
        assert "Traceback" not in done.stderr
        assert Path("/app/mine").exists()
        shutil.rmtree("/app")

    def test_tests_run_despite_agent_files_in_tests_directory(self, cli: Cli) -> None:
        command = 'mkdir -p /tests && touch /tests/test.sh /tests/mine; echo "Hello, harbor!" >/app/greeting.txt'
        replies = f"policy.replies=['```bash\n{command}\n```']"
        words = ("env.tasks=write-greeting", "policy=scripted", "agent=shell", "limits.steps=1", replies)
        done = cli("container=host", "tracker=none", *words)
        assert "1 of 1 episodes finished" in done.stdout, done.stdout + done.stderr
        assert "mean reward 1.00" in done.stdout
        assert left() == []

    def test_separate_container_for_tests_is_refused(self, cli: Cli, tmp_path: Path) -> None:
        task = tmp_path / "tasks" / "task"
        shutil.copytree(ROOT / "ares_exp/tasks/samples/write-greeting", task)
        with (task / "task.toml").open("a") as file:
            file.write("\n[verifier.environment]\nnetwork_mode = 'no-network'\n")
        text = (task / "task.toml").read_text().replace("[verifier]", "[verifier]\nenvironment_mode = 'separate'")
        (task / "task.toml").write_text(text)
        done = cli("container=host", "tracker=none", "env.path=tasks")
        assert done.returncode == 2
        assert "the tests need a separate container" in done.stderr
