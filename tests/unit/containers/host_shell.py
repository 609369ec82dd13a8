"""`ChannelStream` on a plain `sh` of the host: the channel's real shell, without a container around it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ares_exp.containers.command_runner import CommandRunner
from ares_exp.containers.container import Shell, User


class HostShell:
    """One `sh` process at the other end of a socket pair."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        return await self._reader.read(65536)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


def fields(stat: Path) -> tuple[int, int, int] | None:
    """Process, parent and session; `None` when it has just ended."""
    try:
        words = stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.parent.name), int(words[1]), int(words[3])


@asynccontextmanager
async def host_channels(
    program: Sequence[str] = ("sh",),
    *,
    workdir: str | None = None,
    shell: Shell = "bash -c",
    path: str | None = None,
    may_open: asyncio.Semaphore | None = None,
) -> AsyncIterator[tuple[CommandRunner, list[HostShell]]]:
    """Channels on shells of the host, and the list of those that were opened. Nothing is left of them afterwards.

    With `may_open`, each shell waits for it before it opens, as for a slow engine.
    """
    opened: list[HostShell] = []
    environment = {"PATH": path or os.environ["PATH"], "HOME": "/nonexistent"}

    async def open_stream(user: User | None) -> HostShell:
        if may_open is not None:
            await may_open.acquire()
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 (takes a millisecond)
                program, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        opened.append(HostShell(process, *await asyncio.open_connection(sock=ours)))
        return opened[-1]

    channels = CommandRunner(open_stream, workdir=workdir, shell=shell)
    try:
        yield channels, opened
    finally:
        await channels.close()
        # All that is left of the shells is killed, stopped processes included.
        rows = [row for path in Path("/proc").glob("[0-9]*/stat") if (row := fields(path))]
        doomed = {pid for pid, _, session in rows if session in {one.process.pid for one in opened}}
        while more := {pid for pid, parent, _ in rows if parent in doomed} - doomed:
            doomed |= more
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for one in opened:
            one.close()
            one.process.wait(timeout=30)
