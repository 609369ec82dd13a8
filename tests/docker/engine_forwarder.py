"""A TCP port in front of the real engine: to us it is an engine on another machine, whose processes are not ours."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.docker.engine_relay import ENGINE


@contextlib.asynccontextmanager
async def forwarded_engine() -> AsyncIterator[str]:
    """Yields what DOCKER_HOST has to be."""
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        far_reader, far_writer = await asyncio.open_unix_connection(ENGINE)
        try:
            sending = asyncio.create_task(copy(reader, far_writer))
            await copy(far_reader, writer)
            sending.cancel()
        except asyncio.CancelledError:
            pass
        finally:
            writer.transport.abort()
            far_writer.transport.abort()
            tasks.discard(task)

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield "tcp://{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
