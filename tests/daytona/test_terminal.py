"""Terminals of sandboxes, by the pseudo-terminals of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.containers.terminal import TerminalSession
from ares_exp.errors import ContainerDiedError, ContainerError
from tests.daytona.emulator import Emulator

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
    """Types and reads until the terminal has printed `text`."""
    seen = await session.type_keys(keys, 0.05)
    while text not in seen and not session.has_ended:
        seen += await session.type_keys("", 0.05)
    return seen


async def test_a_terminal_has_a_separate_shell(sandbox: DaytonaContainer, emulator: Emulator) -> None:
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
async def test_of_another_user(sandbox: DaytonaContainer) -> None:
    session = TerminalSession(await sandbox.open_terminal(columns=80, lines=24, user="nobody"))
    seen = await until(session, "tail", "id -un; echo x > $(tty); echo ta''il\r")
    assert "nobody\r\n" in seen
    assert "denied" not in seen
    await session.close()
    with pytest.raises(ContainerError, match="no user nosuch in the sandbox"):
        await sandbox.open_terminal(columns=80, lines=24, user="nosuch")


async def test_closing_a_terminal_kills_its_processes(sandbox: DaytonaContainer, emulator: Emulator) -> None:
    session = TerminalSession(await sandbox.open_terminal(columns=80, lines=24))
    await until(session, "sleep 2000\r\n", "sleep 2000\r")
    await session.close()
    gone = "while grep -qa 200[0] /proc/[0-9]*/cmdline 2>/dev/null; do sleep 0.05; done; echo gone"
    assert (await sandbox.exec(gone, timeout_sec=20)).output == "gone\n"
    [one] = emulator.sandboxes.values()
    assert len(one.terminals) == SHELLS


async def test_it_ends_with_the_sandbox(sandbox: DaytonaContainer, emulator: Emulator) -> None:
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
