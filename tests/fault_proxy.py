"""A TCP proxy that cuts connections where it is told to: before the first byte, midway, around the last event."""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Literal, Self

Cut = Literal["before_first_byte", "in_the_middle", "before_the_end", "after_the_end"]
CUTS: tuple[Cut, ...] = ("before_first_byte", "in_the_middle", "before_the_end", "after_the_end")
LAST_EVENT = b"data: [DONE]\n\n"


class FaultProxy:
    def __init__(self, target: tuple[str, int], next_cut: Callable[[], Cut | None]) -> None:
        """Cuts each connection as `next_cut()` says when it is made; `None`: not at all."""
        self._target = target
        self._next_cut = next_cut
        self.cuts: list[Cut] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cut = self._next_cut()
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        pump = asyncio.create_task(_pump(reader, up_writer))
        try:
            if await self._respond(up_reader, writer, cut):
                assert cut is not None
                self.cuts.append(cut)
                for side in (writer, up_writer):
                    reset(side)
        except ConnectionError:
            pass
        finally:
            pump.cancel()
            writer.close()
            up_writer.close()

    async def _respond(self, up_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: Cut | None) -> bool:
        """Passes the response on; whether it is to be cut now."""
        seen = b""
        while data := await up_reader.read(65536):
            if cut == "before_first_byte":
                return True
            seen += data
            if cut == "in_the_middle" and b'"content":' in seen.partition(b"\r\n\r\n")[2]:
                writer.write(data[: len(data) // 2])
                await writer.drain()
                return True
            end = seen.find(LAST_EVENT)
            if cut == "before_the_end" and end >= 0:
                writer.write(data[: max(0, len(data) - (len(seen) - end))])
                await writer.drain()
                return True
            if cut == "after_the_end" and end >= 0:
                writer.write(data[: len(data) - (len(seen) - end - len(LAST_EVENT))])
                await writer.drain()
                return True
            writer.write(data)
            await writer.drain()
        return False


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
