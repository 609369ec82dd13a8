"""Byte streams of a Docker engine: the shell of a `docker exec`, the attached first process, and terminals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ares_exp.errors import ContainerError

_CHUNK_BYTES = 256 * 1024
_STDOUT = 1

_START_SEC = 30.0


class EngineStream:
    """A hijacked connection whose output comes in frames: stream number, three zeros, length, payload.

    A `ChannelStream`.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, with_stderr: bool = False
    ) -> None:
        """Args: with_stderr: Whether `read` also returns stderr."""
        self._reader = reader
        self._writer = writer
        self._with_stderr = with_stderr
        self._wanted = False
        self._left = 0

    async def read(self) -> bytes:
        """Reads the next bytes of the process's output; `b""` at its end.

        Raises:
            OSError: The connection broke.
        """
        try:
            while True:
                if not self._left:
                    header = await self._reader.readexactly(8)
                    self._wanted = header[0] == _STDOUT or self._with_stderr
                    self._left = int.from_bytes(header[4:8], "big")
                    continue
                data = await self._reader.read(min(self._left, _CHUNK_BYTES))
                self._left -= len(data)
                if self._wanted or not data:
                    return data
        except asyncio.IncompleteReadError:
            return b""

    async def write(self, data: bytes) -> None:
        """Sends `data` to the process's stdin.

        Raises:
            OSError: The connection broke.
        """
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """Closes the connection; the engine closes the process's stdin."""
        self._writer.close()


class DockerTerminal:
    """A `Terminal` over a hijacked connection, raw in both directions."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pid: int,
        hang_up: Callable[[int], Awaitable[None]],
    ) -> None:
        """Args: hang_up: Ends the shell `pid`, which the engine leaves running when the connection is closed."""
        self._reader = reader
        self._writer = writer
        self._pid = pid
        self._hang_up = hang_up
        self._closed = False

    @classmethod
    async def started(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        hang_up: Callable[[int], Awaitable[None]],
    ) -> DockerTerminal:
        """Takes over the connection of a shell that prints its number first.

        Raises:
            ContainerError: It prints something else.
        """
        try:
            async with asyncio.timeout(_START_SEC):
                line = await reader.readline()
            return cls(reader, writer, int(line), hang_up)
        except (OSError, ValueError) as error:
            writer.close()
            raise ContainerError("No terminal could be opened in the container: its shell does not start.") from error
        except BaseException:
            writer.close()
            raise

    async def read(self) -> bytes:
        return await self._reader.read(_CHUNK_BYTES)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._writer.close()
            await self._hang_up(self._pid)
