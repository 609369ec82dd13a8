"""`ChannelStream` on a plain `sh` of the host: the channel's real shell, without a container around it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ares_exp.containers.container import User
from ares_exp.containers.shell_channel import ShellChannels


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
        self.process.kill()
        self.process.wait(timeout=5)


@asynccontextmanager
async def host_channels(
    shell: Sequence[str] = ("sh",), *, workdir: str | None = None, login_shell: bool = False, path: str | None = None
) -> AsyncIterator[tuple[ShellChannels, list[HostShell]]]:
    """Channels on shells of the host, and the list of those that were opened. Nothing is left of them afterwards."""
    opened: list[HostShell] = []
    environment = {"PATH": path or os.environ["PATH"], "HOME": "/nonexistent"}

    async def open_stream(user: User | None) -> HostShell:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 (takes a millisecond)
                shell, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        opened.append(HostShell(process, *await asyncio.open_connection(sock=ours)))
        return opened[-1]

    channels = ShellChannels(open_stream, workdir=workdir, login_shell=login_shell)
    try:
        yield channels, opened
    finally:
        await channels.close()
        for one in opened:
            one.close()
