"""Byte streams to processes in a Docker container."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import BinaryIO, TypeVar

from ares_exp.cancellation import finish
from ares_exp.containers.docker.engine import Engine, in_thread

_CHUNK_BYTES = 256 * 1024
_STDOUT = 1

_DRAIN_SEC = 10.0
_T = TypeVar("_T")


class EngineStream:
    """The stdin and stdout of a process, as a `ChannelStream` over a connection from `Engine.hijack`.

    The engine sends output in frames: stream number, three zero bytes, length, payload. With `with_stderr`, `read`
    returns both stdout and stderr. Otherwise, stderr is discarded.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, with_stderr: bool = False
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._with_stderr = with_stderr
        self._wanted = False
        self._left = 0

    async def read(self) -> bytes:
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
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """Closes the connection. The engine then closes the stdin of the process."""
        self._writer.close()


class DockerTerminal:
    """A `Terminal` over a connection from `Engine.hijack`, on which the engine sends plain bytes without frames."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hang_up: Callable[[], Awaitable[None]]
    ) -> None:
        """Takes over a connection. `hang_up` must end the shell, which the engine would keep running."""
        self._reader = reader
        self._writer = writer
        self._hang_up = hang_up
        self._closed = False

    async def read(self) -> bytes:
        return await self._reader.read(_CHUNK_BYTES)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._writer.close()
            await self._hang_up()


async def run_program(
    engine: Engine, container: str, command: Sequence[str], stdin: bytes, read: Callable[[BinaryIO], _T]
) -> tuple[_T, int]:
    """Runs a program as root in the container, in the directory `/`. Its stderr is discarded.

    `read` is called in a thread with a stream of the output, which is not seekable. Returns the result of `read` and
    the exit code. Raises errors of the engine and of `read`.
    """
    created = await in_thread(
        lambda: engine.api.exec_create(container, list(command), stdin=True, user="0:0", workdir="/"), abandon=True
    )
    connection = await engine.hijack(f"/exec/{created['Id']}/start", {"Detach": False, "Tty": False})
    stream = EngineStream(*connection)
    feeder = asyncio.create_task(_feed(connection[1], stdin))
    try:
        found = await _read_in_thread(stream, read)
        await feeder
    finally:
        feeder.cancel()
        await finish(_drain(stream))  # otherwise the program would block on its output
        await finish(asyncio.wait({feeder}))
        stream.close()
    answer = await in_thread(lambda: engine.api.exec_inspect(created["Id"]), abandon=True)
    return found, int(answer["ExitCode"])


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the program ended without reading everything: the exit code shows why
        writer.write(data)
        await writer.drain()
        writer.write_eof()


async def _drain(stream: EngineStream) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_DRAIN_SEC):
            while await stream.read():
                pass


async def _read_in_thread(stream: EngineStream, read: Callable[[BinaryIO], _T]) -> _T:
    """Calls `read` in a thread, and passes the stream to it through a socket pair, whose small buffer limits memory."""
    ours, theirs = socket.socketpair()

    def work() -> _T:
        with theirs, theirs.makefile("rb") as file:
            return read(file)

    try:
        _, writer = await asyncio.open_unix_connection(sock=ours)
    except BaseException:  # cancelled
        ours.close()
        theirs.close()
        raise
    reading = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        with contextlib.suppress(ConnectionError):  # the reader has ended
            while data := await stream.read():
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()
        await finish(asyncio.wait({reading}))
    return reading.result()
