"""Shells and terminals of sandboxes on the service's pseudo-terminals."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.containers.terminal import TerminalSession
from ares_exp.errors import ContainerDiedError, ContainerError
from tests.daytona.emulator import Emulator, Fault
from tests.daytona.emulator.terminals import MAX_QUEUED

pytestmark = [pytest.mark.local, pytest.mark.once]


@pytest_asyncio.fixture
async def sandbox(factory: DaytonaContainerFactory) -> AsyncIterator[DaytonaContainer]:
    spec = ContainerSpec("terminal", docker_image="debian:bookworm-slim", workdir="/tmp", env={"OF_TASK": "t"})
    async with factory(spec) as container:
        assert isinstance(container, DaytonaContainer)
        yield container


SHELLS = 2
"""The terminals in which a sandbox's shells for commands run."""


async def until(session: TerminalSession, text: str, keys: str = "") -> str:
    seen = await session.type_keys(keys, 0.05)
    while text not in seen and not session.has_ended:
        seen += await session.type_keys("", 0.05)
    return seen


async def test_terminal_has_a_separate_shell(sandbox: DaytonaContainer, emulator: Emulator) -> None:
    session = TerminalSession(
        await sandbox.open_terminal(columns=90, lines=25, env={"MINE": "a 'b'", "KEY": "se\ncret"})
    )
    try:
        seen = await until(
            session, "tail", "stty size; pwd; echo $MINE $TERM $OF_TASK; id -un; echo \"$_then\"ta''il\r"
        )
        for line in ("25 90", "/tmp", "a 'b' xterm-256color t", "root"):
            assert f"{line}\r\n" in seen
        assert "exec sh" not in seen
        await until(session, "cat\r\n", "cat\r")
        await until(session, "started\r\nstarted\r\n", "started\r")
        await until(session, "# ", "\x03")
        await until(session, "end\r\n", "head -c 299999 /dev/zero | tr '\\0' x | fold -w 99; echo e''nd\r")
        await until(session, "it ends before it says this", "exit\r")
        assert session.has_ended
    finally:
        await session.close()
        await session.close()
    assert (await sandbox.exec("ls /tmp/.ares_exp-*/ | grep terminal; true")).output == ""
    assert "se\\ncret" not in str([request.query for request in emulator.requests if "pty" in request.path])


@pytest.mark.root
async def test_terminal_runs_as_another_user(sandbox: DaytonaContainer) -> None:
    session = TerminalSession(await sandbox.open_terminal(columns=80, lines=24, user="nobody"))
    seen = await until(session, "tail", "id -un; echo x > $(tty); echo ta''il\r")
    assert "nobody\r\n" in seen
    assert "denied" not in seen
    await session.close()
    with pytest.raises(ContainerError, match="no user nosuch in the sandbox"):
        await sandbox.open_terminal(columns=80, lines=24, user="nosuch")


async def test_closed_terminal_kills_its_processes(sandbox: DaytonaContainer, emulator: Emulator) -> None:
    session = TerminalSession(await sandbox.open_terminal(columns=80, lines=24))
    await until(session, "sleep 2000\r\n", "sleep 2000\r")
    await session.close()
    gone = "while grep -qa 200[0] /proc/[0-9]*/cmdline 2>/dev/null; do sleep 0.05; done; echo gone"
    assert (await sandbox.exec(gone, timeout_sec=20)).output == "gone\n"
    [one] = emulator.sandboxes.values()
    assert len(one.terminals) == SHELLS


async def test_terminal_ends_with_the_sandbox(sandbox: DaytonaContainer, emulator: Emulator) -> None:
    lost, stopped = [TerminalSession(await sandbox.open_terminal(columns=80, lines=24)) for _ in range(2)]
    [one] = emulator.sandboxes
    emulator.lose(one)
    await until(lost, "it is lost before it says this", "ls\r")
    assert lost.has_ended
    await lost.close()
    with pytest.raises(ContainerDiedError):
        await sandbox.open_terminal(columns=80, lines=24)
    await sandbox.stop()
    await until(stopped, "nothing", "ls\r")
    await stopped.close()


LINES = 200_000
"""Of more bytes than the service keeps for a client."""

SHA256 = hashlib.sha256("".join(f"{n}\n" for n in range(1, LINES + 1)).encode()).hexdigest()


async def test_large_output_is_throttled_on_slow_connections(emulator: Emulator, box: DaytonaContainer) -> None:
    """The service cuts off a client for whom too much waits."""
    emulator.traffic.message_sec = 0.005
    result = await box.exec(f"seq 1 {LINES}", max_output_bytes=2**22, timeout_sec=200)
    assert hashlib.sha256(result.output.encode()).hexdigest() == SHA256
    assert len(result.output) > 4096 * MAX_QUEUED
    assert emulator.traffic.cut_off == 0
    assert (await box.exec("ls /tmp/.ares_exp-*/ | grep -c '[.]'; true")).output in ("0\n", "1\n", "2\n")


async def test_acknowledgements_are_repeated(emulator: Emulator, box: DaytonaContainer) -> None:
    for kind in ("drop", "drop_after", "status"):
        emulator.faults.add(Fault(kind, "DELETE", "/files$", status=502))  # type: ignore[arg-type]
    result = await box.exec(f"seq 1 {LINES}", max_output_bytes=2**22, timeout_sec=200)
    assert hashlib.sha256(result.output.encode()).hexdigest() == SHA256


async def test_shell_without_acknowledgements_is_lost(emulator: Emulator, box: DaytonaContainer) -> None:
    emulator.faults.add(Fault("status", "DELETE", "/files$", status=403, times=None))
    with pytest.raises(ContainerDiedError, match=r"connection to a shell of the container broke.*returned 403"):
        await box.exec(f"seq 1 {LINES}", timeout_sec=200)
    emulator.faults.clear()
    assert (await box.exec("echo next")).output == "next\n"


async def test_broken_connection_does_not_end_a_command(emulator: Emulator, box: DaytonaContainer) -> None:
    running = asyncio.create_task(box.exec("touch /tmp/started; sleep 4331"))
    await box.exec("until [ -e /tmp/started ]; do sleep 0.01; done")
    emulator.traffic.cut()
    with pytest.raises(ContainerDiedError, match="connection to a shell of the container broke"):
        await running
    assert (await box.exec("echo next")).output == "next\n"


async def test_end_of_the_sandbox_ends_its_commands(emulator: Emulator, box: DaytonaContainer) -> None:
    running = asyncio.create_task(box.exec("touch /tmp/started; sleep 4332"))
    await box.exec("until [ -e /tmp/started ]; do sleep 0.01; done")
    emulator.lose(next(iter(emulator.sandboxes)))
    for asked in (running, box.exec("true")):
        with pytest.raises(ContainerDiedError, match=f"{box.sandbox_name} has ended"):
            await asked


async def test_forged_marks_affect_only_the_sandbox(emulator: Emulator, box: DaytonaContainer) -> None:
    """It is root, and may do what it likes in its sandbox; on this side it gets no further."""
    key = 'key=$(sed -n "s/^printf .*n. \\([0-9a-f]*\\)$/\\1/p" /tmp/.ares_exp-*/shell)'
    forged = f"{key}; printf '\\035%s %s\\035' $key"
    await box.exec(f"{forged} 99; echo more")
    result = await box.exec("echo a; touch /passwd")
    assert (result.output, result.exit_code) == ("a\n", 0)
    await box.exec(f"{forged} ../../passwd; echo more")
    assert (await box.exec("ls /passwd; rm -rf /tmp/.ares_exp-*")).output == "/passwd\n"
    assert (await box.exec("echo still", timeout_sec=60)).output == "still\n"


@pytest.mark.root
async def test_commands_run_as_the_given_user(box: DaytonaContainer) -> None:
    for user, said in {
        "root": "0 0",
        0: "0 0",
        "nobody": "65534 65534",
        65534: "65534 65534",
        "65534:4": "65534 4",
        "4321:1234": "4321 1234",
        4321: "4321 0",
    }.items():
        assert (await box.exec("echo $(id -u) $(id -g)", user=user)).output == f"{said}\n"


@pytest.mark.root
async def test_processes_of_another_user_are_killed(box: DaytonaContainer) -> None:
    late = await box.exec("echo started; (trap '' TERM; sleep 4324) & sleep 4324", user="nobody", timeout_sec=1)
    assert (late.output, late.timed_out) == ("started\n", True)
    left = await box.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 432[4]'", shell="sh -c")
    assert left.output == "0\n"
