"""Commands in a box, each run by a fresh shell. stdout and stderr are one stream."""

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

_SURROGATES = re.compile("[\udc80-\udcff]")


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


async def run(box: Box, command: str, *, timeout: float | None = None) -> Outcome:
    """Runs `command` to its end.

    Args:
        box: Where.
        command: Source text for the box's shell.
        timeout: Seconds after which it is given up.

    Raises:
        ContainerError: The box is gone.
    """
    key = secrets.token_hex(16)
    script = f"cd {shlex.quote(box.workdir)}; {box.shell} -c {shlex.quote(command)} 2>&1 </dev/null; "
    output = bytearray()
    async with shell(box) as stream:
        await stream.write(f"{script} echo '{key}' $?; exit\n".encode("utf-8", "replace"))
        try:
            async with asyncio.timeout(timeout):
                async for data in Lines(stream).rest():
                    output += data
        except TimeoutError:
            return Outcome(timed_out=True)
    text, mark, code = output.rpartition(key.encode())
    if not mark:
        raise ContainerError("The box ended while a command ran.")
    # Bytes as Go puts them into JSON: each one that is no UTF-8 becomes U+FFFD.
    return Outcome(int(code), _SURROGATES.sub("\ufffd", bytes(text).decode("utf-8", "surrogateescape")))
