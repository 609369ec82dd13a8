"""A terminal of a Docker container: a `docker exec` with a pseudo-terminal of the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ares_exp.errors import ContainerError

_CHUNK_BYTES = 64 * 1024
_BEGIN_SEC = 30.0


class DockerTerminal:
    """A `Terminal` over a hijacked connection, raw in both directions."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pid: int,
        hang_up: Callable[[int], Awaitable[None]],
    ) -> None:
        """Takes over the connection.

        Args:
            reader: The output.
            writer: The keyboard.
            pid: The shell, as numbered in the container.
            hang_up: Ends it: the engine leaves it running when the connection is closed.
        """
        self._reader = reader
        self._writer = writer
        self._pid = pid
        self._hang_up = hang_up
        self._closed = False

    @classmethod
    async def begun(
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
            async with asyncio.timeout(_BEGIN_SEC):
                line = await reader.readline()
            return cls(reader, writer, int(line), hang_up)
        except (OSError, ValueError) as error:
            writer.close()
            raise ContainerError("No terminal could be opened in the container: its shell does not begin.") from error
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
