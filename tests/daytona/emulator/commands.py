"""Commands in a box, run as the daemon in a real sandbox runs them.

Each is read by a fresh shell from its stdin, so that a program in it which reads stdin eats the rest of the command.
The shell leads a process group of its own, which a time limit kills. stdout and stderr are one stream, and the answer
waits until nobody holds it any more. (A real daemon says -1 of a shell that a signal ended; here that is 128 + n.)
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ares_exp.containers.shell_channel import ChannelStream
from ares_exp.errors import ContainerError
from tests.daytona.emulator.boxes import Box, Lines

_CHUNK_BYTES = 64 * 1024
_DRAIN_SEC = 30.0
_SURROGATES = re.compile("[\udc80-\udcff]")

_START = 'cd {cwd}; echo "{key} ready"; {head} -c {size} | {setsid} /bin/sh -c {shell}; echo "{key} exit $?"; exit\n'


@dataclass(frozen=True)
class Outcome:
    """What a command did: `timed_out` without output, else its exit code and output."""

    exit_code: int = -1
    output: str = ""
    timed_out: bool = False


@contextlib.asynccontextmanager
async def shell(box: Box) -> AsyncIterator[ChannelStream]:
    """A fresh `sh` of the box.

    Raises:
        ContainerError: The box is gone.
    """
    stream = await box.open_shell()
    try:
        yield stream
    finally:
        stream.close()


async def run(
    box: Box,
    command: str,
    *,
    timeout: float | None = None,
) -> Outcome:
    """Runs `command` to its end.

    Args:
        box: Where.
        command: Source text for the box's shell.
        timeout: Seconds after which its process group is killed.

    Raises:
        ContainerError: The box is gone.
    """
    key = secrets.token_hex(16)
    source = _go_bytes(command)
    start = _START.format(
        key=key,
        cwd=shlex.quote(box.workdir),
        head=box.head,
        size=len(source),
        setsid=box.setsid,
        shell=shlex.quote(f'exec 2>&1; echo "{key} pid $$"; exec {box.shell}'),
    )
    async with shell(box) as stream:
        lines = Lines(stream)
        await stream.write(_go_bytes(start))
        said = (await lines.line()).decode(errors="replace")
        if said != f"{key} ready":
            raise ContainerError(f"The box said {said!r}.")
        sender = asyncio.create_task(_send(stream, source))
        try:
            return await _collect(box, lines, key, timeout)
        finally:
            sender.cancel()
            await asyncio.wait({sender})


async def _send(stream: ChannelStream, source: bytes) -> None:
    with contextlib.suppress(OSError):
        for start in range(0, len(source), _CHUNK_BYTES):
            await stream.write(source[start : start + _CHUNK_BYTES])


async def _collect(box: Box, lines: Lines, key: str, timeout: float | None) -> Outcome:
    pid = (await lines.line()).decode(errors="replace").rpartition(" ")[2]
    output = bytearray()

    async def read() -> None:
        async for data in lines.rest():
            output.extend(data)

    reader = asyncio.create_task(read())
    try:
        await asyncio.wait({reader}, timeout=timeout)
        if not reader.done():
            await kill_group(box, pid)
            await asyncio.wait({reader}, timeout=_DRAIN_SEC)
            return Outcome(timed_out=True)
    finally:
        reader.cancel()
        await asyncio.wait({reader})
    head, mark, tail = bytes(output).partition(f"{key} exit ".encode())
    if not mark:
        raise ContainerError("The box ended while a command ran.")
    word, _, later = tail.partition(b"\n")
    return Outcome(int(word), _go_text(head + later))


async def kill_group(box: Box, pid: str) -> None:
    """Kills a process group."""
    async with shell(box) as stream:
        await stream.write(f"kill -s KILL -- -{int(pid)}; echo done; exit\n".encode())
        await Lines(stream).line()


def _go_bytes(text: str) -> bytes:
    """A string as Go has it after it was JSON: lone surrogates are U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _go_text(data: bytes) -> str:
    """Bytes as Go puts them into JSON: each one that is no UTF-8 becomes U+FFFD."""
    return _SURROGATES.sub("\ufffd", data.decode("utf-8", "surrogateescape"))
