"""Programs in a container with binary stdin and stdout, one `docker exec` each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeVar

from ares_exp.cancellation import finish
from ares_exp.containers.docker.engine import Engine, in_thread
from ares_exp.containers.docker.stream import EngineStream

_DRAIN_SEC = 10.0
_T = TypeVar("_T")


async def run_program(
    engine: Engine, container: str, command: Sequence[str], stdin: bytes, read: Callable[[BinaryIO], _T]
) -> tuple[_T, int]:
    """Runs a program as root in `/`; its stderr is dropped.

    Args:
        engine: The engine.
        container: Its name.
        command: The program and its arguments.
        stdin: Its input.
        read: Reads its output, in a thread, from a non-seekable stream. When it raises, the rest of the output is
            dropped.

    Returns:
        The result of `read`, and the exit code.

    Raises:
        EngineError, docker.errors.DockerException, requests.exceptions.RequestException, OSError: The engine refused,
            or is gone; or what `read` raises.
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
        await finish(_drain(stream))  # else the program would block on its output
        await finish(asyncio.wait({feeder}))
        stream.close()
    answer = await in_thread(lambda: engine.api.exec_inspect(created["Id"]), abandon=True)
    return found, int(answer["ExitCode"])


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it ended without reading everything: the exit code tells
        writer.write(data)
        await writer.drain()
        writer.write_eof()


async def _drain(stream: EngineStream) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_DRAIN_SEC):
            while await stream.read():
                pass


async def _read_in_thread(stream: EngineStream, read: Callable[[BinaryIO], _T]) -> _T:
    """Passes the stream to a thread through a socket pair, whose small buffer bounds memory."""
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
