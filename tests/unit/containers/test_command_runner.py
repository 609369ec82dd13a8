"""Commands on shells of the host: what has to do with the pool and with poor shells. The rest is in the contract."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from ares_exp.containers import command_runner as shell_pool
from ares_exp.containers.command_runner import MAX_IDLE, CommandRunner
from ares_exp.containers.container import Shell, User
from ares_exp.containers.shell_channel import ChannelStream
from ares_exp.errors import ContainerError
from tests.leaks import is_alive
from tests.unit.containers.host_shell import HostShell, fields, host_channels

SHELLS = [
    pytest.param(tuple(shell.split()), id=shell)
    for shell in ("sh", "bash", "busybox sh")
    if shutil.which(shell.split()[0])
]

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the channel's shells live on Linux")


@pytest.mark.parametrize("shell", SHELLS)
async def test_any_posix_shell_works(shell: tuple[str, ...], tmp_path: Path) -> None:
    async with host_channels(shell) as (channels, _):
        result = await channels.exec("pwd; echo $A; exit 3", cwd=str(tmp_path), env={"A": "it's\n'"})
        assert (result.output, result.exit_code) == (f"{tmp_path}\nit's '\n", 3)
        assert (await channels.exec(f"x='{'y' * 200_000}'; echo ${{#x}}")).output == "200000\n"
        assert (await channels.exec("true", cwd="/no/such")).exit_code == 126
        late = await channels.exec(
            "trap '' TERM; setsid sleep 99 & echo $!; (env -i sleep 99 & echo $!); kill -STOP $$", timeout_sec=1.5
        )
        assert late.timed_out
        assert [is_alive(int(pid)) for pid in late.output.split()] == [False, False]


async def test_minimal_container_works(tmp_path: Path) -> None:
    """Neither bash nor setsid: `sh` runs the commands, in the channel's own session."""
    for program in ("sh", "cat", "sleep"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    async with host_channels(path=str(tmp_path)) as (channels, _):
        result = await channels.exec("echo $0; sleep 99 & echo $!; wait", timeout_sec=1.5)
        assert result.timed_out
        shell, pid = result.output.split()
        assert shell == "sh"
        assert not is_alive(int(pid))
        assert (await channels.exec("echo next")).output == "next\n"


@pytest.mark.parametrize("shell", ["bash -c", "sh -c"])
async def test_command_runs_as_in_a_manual_shell(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "env").write_text("FROM_FILE=read\n")
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "BASH_ENV": str(tmp_path / "env")}
    program, option = shell.split()
    commands = (
        *("set -x; echo traced", "echo one\nno-such-program\necho three >&2", "echo before\n("),
        *("set -v; trap 'echo bye >&2' EXIT; false", "echo $0 $-", "echo $FROM_FILE; sh -c 'kill -KILL $$'"),
    )
    async with host_channels(shell=shell) as (channels, _):
        for command in commands:
            by_hand = subprocess.run(  # noqa: ASYNC221 (it takes a millisecond)
                [program if program == "sh" else str(shutil.which(program)), option, command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                text=True,
                check=False,
            )
            result, code = await channels.exec(command, env=env), by_hand.returncode
            assert (result.output, result.exit_code) == (by_hand.stdout, code if code >= 0 else 128 - code)


def signal_all_of(pid: int, number: signal.Signals) -> None:
    os.kill(pid, signal.SIGSTOP)
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            signal_all_of(int(child), number)
    os.kill(pid, number)


async def test_consecutive_commands_alternate_between_two_shells() -> None:
    async with host_channels() as (channels, opened):
        for n in range(40):
            assert (await channels.exec(f"echo {n}")).output == f"{n}\n"
        assert len(opened) == 2


async def test_concurrent_commands_use_the_first_available_shell() -> None:
    may_open = asyncio.Semaphore(2)  # the engine opens two, and takes for ever with the others
    async with host_channels(may_open=may_open) as (channels, opened):
        results = await asyncio.gather(*(channels.exec(f"echo {n}") for n in range(64)))
        assert [result.output for result in results] == [f"{n}\n" for n in range(64)]
        assert len(opened) == 2


async def test_long_commands_get_separate_shells(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    together = f"touch {here}/$$; until [ $(ls {here} | wc -l) -ge 20 ]; do sleep 0.05; done"
    async with host_channels() as (channels, _):
        results = await asyncio.gather(*(channels.exec(together, timeout_sec=60) for _ in range(20)))
        assert [result.exit_code for result in results] == [0] * 20
        await asyncio.wait({one.ready for one in channels._shells._channels[None]}, timeout=60)
        assert len(channels._shells.idle(None)) == MAX_IDLE  # the others were closed


async def test_close_ends_the_wait_for_a_shell() -> None:
    async with host_channels(may_open=asyncio.Semaphore(0)) as (channels, _):
        waiting = [asyncio.create_task(channels.exec("true")) for _ in range(20)]
        await asyncio.sleep(0)
        await channels.close()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(one) for one in ended] == ["The container has been stopped and runs no more commands."] * 20


async def test_cancelled_wait_for_shell_loses_no_shell() -> None:
    may_open = asyncio.Semaphore(0)
    async with host_channels(may_open=may_open) as (channels, opened):
        cancelled = [asyncio.create_task(channels.exec("true")) for _ in range(5)]
        await asyncio.sleep(0)
        for one in cancelled:
            one.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        for _ in range(5):
            may_open.release()
        for n in range(5):
            assert (await channels.exec(f"echo {n}")).output == f"{n}\n"
        assert len(opened) <= 6


async def test_cancelled_waiter_passes_its_shell_on() -> None:
    async with host_channels(may_open=asyncio.Semaphore(1)) as (channels, _):
        pool = channels._shells
        lent = await pool.take(None)
        first, second = (asyncio.create_task(pool.take(None)) for _ in range(2))
        await asyncio.sleep(0)
        pool._changed(lent)  # it is the first one's
        first.cancel()
        assert await asyncio.wait_for(second, 30) is lent
        assert first.cancelled()


async def test_shell_is_freed_when_background_process_ends(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with host_channels() as (channels, opened):
        assert (await channels.exec(f"(read line <{fifo}; echo noise) & echo started")).output == "started\n"
        assert (await channels.exec("echo other")).output == "other\n"
        await channels.exec(f"echo go >{fifo}")
        await asyncio.sleep(0.5)
        count = len(opened)
        results = await asyncio.gather(*(channels.exec("sleep 0.3; echo x") for _ in range(count)))
        assert [result.output for result in results] == ["x\n"] * count
        assert len(opened) <= count + 1  # all of them, and one to end a command with


async def test_shells_that_died_while_idle_are_replaced() -> None:
    async with host_channels() as (channels, opened):
        await asyncio.gather(*(channels.exec("sleep 0.2") for _ in range(5)))
        await asyncio.sleep(0.5)  # they idle: the next one's processes have been forked
        for one in opened:
            signal_all_of(one.process.pid, signal.SIGKILL)
        assert (await channels.exec("echo fine")).output == "fine\n"
        late = await channels.exec("echo partial; sleep 99", timeout_sec=1.5)
        assert (late.output, late.timed_out) == ("partial\n", True)


async def test_command_that_stops_its_shell_times_out() -> None:
    async with host_channels() as (channels, _):
        late = await channels.exec("echo partial; kill -STOP $PPID; sleep 99", timeout_sec=1.0)
        assert (late.output, late.timed_out) == ("partial\n", True)
        assert (await channels.exec("echo next")).output == "next\n"


async def until_killed(opened: list[HostShell]) -> None:
    """Waits until one of the stopped shells, which might still start its command, has been killed."""
    async with asyncio.timeout(10):
        while all(one.process.poll() != -signal.SIGKILL for one in opened):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)


async def test_shells_that_were_stopped_while_idle_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_pool, "_START_SEC", 1.0)
    async with host_channels() as (channels, opened):
        await channels.exec("true")
        await asyncio.sleep(0.2)  # the next one's process has been forked
        for one in opened:
            signal_all_of(one.process.pid, signal.SIGSTOP)
        assert (await channels.exec("echo once >&2; echo next")).output == "once\nnext\n"
        await until_killed(opened)


async def test_time_limit_bounds_wait_for_stopped_shell(tmp_path: Path) -> None:
    async with host_channels() as (channels, opened):
        await channels.exec("true")
        await asyncio.sleep(0.2)
        for one in opened:
            signal_all_of(one.process.pid, signal.SIGSTOP)
        late = await channels.exec(f"echo never; touch {tmp_path}/ran", timeout_sec=0.3)
        assert (late.output, late.timed_out) == ("", True)
        await until_killed(opened)
        assert not (tmp_path / "ran").exists()


async def test_stderr_is_separate_for_concurrent_and_background_commands() -> None:
    async with host_channels() as (channels, _):
        both = await asyncio.gather(*(channels.exec(f"echo {n} >&2", separate_stderr=True) for n in range(8)))
        assert [(one.output, one.stderr) for one in both] == [("", f"{n}\n") for n in range(8)]
        noisy = await channels.exec("sleep 0.3 & echo started >&2", separate_stderr=True)
        assert noisy.stderr == "started\n"


async def test_cancelling_many_commands_kills_all(tmp_path: Path) -> None:
    async with host_channels() as (channels, _):
        tasks = [asyncio.create_task(channels.exec(f"echo $$ >{tmp_path}/{n}; exec sleep 99")) for n in range(6)]
        async with asyncio.timeout(20):
            while len([path for path in tmp_path.iterdir() if path.stat().st_size]) < len(tasks):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert all(isinstance(error, asyncio.CancelledError) for error in done)
        assert not any(is_alive(int(path.read_text())) for path in tmp_path.iterdir())


async def test_concurrent_kill_requests_are_all_executed(tmp_path: Path) -> None:
    async with host_channels() as (channels, _):
        commands = [asyncio.create_task(channels.exec(f"echo $$ >{tmp_path}/{n}; exec sleep 99")) for n in range(3)]
        async with asyncio.timeout(20):
            while len([path for path in tmp_path.iterdir() if path.stat().st_size]) < len(commands):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        pids = [int((tmp_path / str(n)).read_text()) for n in range(3)]
        async with channels._killer._lock:
            kills = [asyncio.create_task(channels._killer.kill(None, "none", pid)) for pid in pids[:2]]
            await asyncio.sleep(0)  # both wait for their turn
        for _ in range(3):
            await asyncio.sleep(0)  # the first kills for both
        kills.append(asyncio.create_task(channels._killer.kill(None, "none", pids[2])))
        await asyncio.wait_for(asyncio.gather(*kills), 20)
        assert not any(is_alive(pid) for pid in pids)
        assert [one.exit_code for one in await asyncio.wait_for(asyncio.gather(*commands), 20)] == [137] * 3


async def test_dead_spare_shells_are_replaced_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_pool, "_START_SEC", 600.0)
    async with host_channels() as (channels, opened):
        await asyncio.gather(*(channels.exec("sleep 0.2") for _ in range(3)))
        await asyncio.sleep(0.5)  # they idle: the next one's processes have been forked
        for pid, parent, session in [row for path in Path("/proc").glob("[0-9]*/stat") if (row := fields(path))]:
            if pid == session and parent in descendants(opened):
                with contextlib.suppress(ProcessLookupError):  # what helped the last command may just have ended
                    os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            assert (await channels.exec("echo next")).output == "next\n"
            assert (await channels.exec("echo next >&2", separate_stderr=True)).stderr == "next\n"


def descendants(opened: list[HostShell]) -> set[int]:
    """The processes of the shells' own sessions."""
    rows = [row for path in Path("/proc").glob("[0-9]*/stat") if (row := fields(path))]
    return {pid for pid, _, session in rows if session in {one.process.pid for one in opened}}


# A container whose `sh` has the key and says what it likes. The argument is the last mark.
LIAR = r"""
while IFS= read -r line; do
  case $line in *hello*) key=${line#*036} key=${key%% *}; break ;; esac
done
printf '\036%s hello 0|\036\036%s ready\036' $key $key
while IFS= read -r line; do
  case $line in *start*) printf '\036%s start 999999999\036\036%s %s\036' $key $key "$1" ;; esac
done
"""


@pytest.mark.parametrize("mark", ["start x", "999999999999", "x", "sink x", "x" * 20_000])
async def test_forged_marks_close_the_shell(mark: str) -> None:
    async with host_channels(("sh", "-c", LIAR, "sh", mark)) as (channels, _):
        result = await asyncio.wait_for(channels.exec("true"), 20)
        assert (result.output, result.exit_code) == ("", 137)


async def test_output_after_exit_code_is_dropped() -> None:
    async with host_channels(("sh", "-c", LIAR, "sh", "3\x1elate")) as (channels, _):
        result = await asyncio.wait_for(channels.exec("true"), 30)
        assert (result.output, result.exit_code) == ("", 3)


async def test_unsendable_commands_are_refused() -> None:
    async with host_channels() as (channels, opened):
        for command, env in [("echo \ud800", {}), ("true", {"A": "\ud800"}), ("a\0b", {}), ("true", {"a-b": ""})]:
            with pytest.raises(ValueError, match="Expected"):
                await channels.exec(command, env=env)
        assert opened == []


async def test_second_cancellation_does_not_skip_the_kill(tmp_path: Path) -> None:
    started = tmp_path / "started"
    async with host_channels() as (channels, _):
        task = asyncio.create_task(channels.exec(f"echo $$ >{started}; exec sleep 4999"))
        async with asyncio.timeout(20):
            while not (started.exists() and started.stat().st_size):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_alive(int(started.read_text()))


class Mute:
    """A shell that says something and ends, as an engine does that cannot start one."""

    def __init__(self, words: bytes) -> None:
        self._words = [words]
        self.closed = False

    async def read(self) -> bytes:
        return self._words.pop() if self._words else b""

    async def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (b"unable to find user x\r\n", ContainerError, "as x: unable to find user x"),
        (b"", ContainerError, "ended immediately"),
    ],
)
async def test_shell_that_cannot_be_opened_is_an_error(words: bytes, error: type[Exception], message: str) -> None:
    stream = Mute(words)

    async def open_stream(user: User | None) -> ChannelStream:
        return stream

    channels = CommandRunner(open_stream)
    with pytest.raises(error, match=message):
        await channels.exec("true", user="x")
    assert stream.closed
    await channels.close()


async def test_failed_opening_is_reported_to_all_waiters() -> None:
    fails = asyncio.Event()

    async def open_stream(user: User | None) -> ChannelStream:
        await fails.wait()
        raise ContainerError("no shell")

    channels = CommandRunner(open_stream)
    waiting = [asyncio.create_task(channels.exec("true")) for _ in range(30)]
    await asyncio.sleep(0)
    fails.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(one) for one in ended] == ["no shell"] * 30
    async with asyncio.timeout(20):
        for _ in range(3):  # one who asks again at once is told, too
            with pytest.raises(ContainerError, match="no shell"):
                await channels.exec("true")
    await channels.close()


class SecondFails(asyncio.Semaphore):
    """An engine that cannot open the second shell, the spare one, and says so late."""

    opened = 0

    async def acquire(self) -> Literal[True]:
        self.opened += 1
        if self.opened == 2:
            await asyncio.sleep(1)
            raise ContainerError("its shell ended immediately")
        return True


async def test_failed_spare_shell_does_not_fail_the_kill() -> None:
    async with host_channels(may_open=SecondFails()) as (channels, _):
        result = await channels.exec("echo $$; exec sleep 99", timeout_sec=0.3)
        assert result.timed_out
        assert not is_alive(int(result.output))


async def test_mute_shell_is_retried_once() -> None:
    """What it says may be what an agent has written into the place of `sh`."""
    opened: list[Mute] = []

    async def open_stream(user: User | None) -> ChannelStream:
        opened.append(Mute(b"chdir to cwd\n"))
        return opened[-1]

    channels = CommandRunner(open_stream, try_again=lambda why: why == "chdir to cwd")
    with pytest.raises(ContainerError, match=r"No shell could be opened in the container .*: chdir to cwd"):
        await channels.exec("true")
    assert [one.closed for one in opened] == [True, True]
    await channels.close()
