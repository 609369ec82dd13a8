"""A server on a non-loopback address of this machine, to test whether containers can reach it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n"


def host_address() -> str:
    """Returns a non-loopback address of this machine, without sending data. Skips the test if there is none."""
    for anywhere in ("192.0.2.1", "172.17.0.2"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            return str(probe.getsockname()[0])
    pytest.skip("this machine has only loopback addresses")


@asynccontextmanager
async def hello_server(address: str | None = None) -> AsyncIterator[tuple[str, int]]:
    """Starts an HTTP server that responds `hello`, by default on `host_address()`. Yields its address and port."""
    connections: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[asyncio.current_task()] = writer
        with contextlib.suppress(OSError, EOFError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HELLO)
            await writer.drain()
        writer.close()

    address = address or host_address()
    server = await asyncio.start_server(serve, address, 0)
    try:
        yield address, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task, writer in connections.items():
            writer.transport.abort()
            if task is not None:
                await asyncio.wait({task}, timeout=10)
