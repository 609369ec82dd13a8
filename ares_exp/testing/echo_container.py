"""A simulated container that does not run commands, so that agents can be tested without a container backend."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Unpack

from ares_exp.containers.container import ExecOptions, ExecResult
from ares_exp.containers.terminal import Terminal
from ares_exp.errors import TransferError


class RehearsalContainer:
    """A simulated `AgentContainer`, which returns scripted results instead of running commands.

    Uploaded files are kept in memory. Concurrent commands end in a random order. Terminals only echo their input.
    """

    def __init__(self, response: Callable[[str], str | ExecResult] | None = None) -> None:
        """Stores `response`, a function that returns the output or the result of a command.

        By default, the output of a command is the command itself, followed by the number of commands so far.
        """
        self.commands = 0
        self.files: dict[PurePosixPath, bytes] = {}
        self._respond = response
        self._random = random.Random(0)

    async def exec(self, command: str, **_: Unpack[ExecOptions]) -> ExecResult:
        """Returns the scripted result of a command, without running the command. Options have no effect."""
        self.commands += 1
        output = f"{command}\n{self.commands}\n" if self._respond is None else self._respond(command)
        for _turn in range(self._random.randrange(4)):
            await asyncio.sleep(0)
        return output if isinstance(output, ExecResult) else ExecResult(output, exit_code=0, duration_sec=0.001)

    async def open_terminal(self, **_: Any) -> Terminal:
        """Opens a terminal that echoes its input."""
        return _EchoTerminal()

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Reads files of the host into memory, so that `download` can write them."""
        self.files |= await asyncio.to_thread(_read, Path(source), PurePosixPath(target))

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Writes uploaded files to the host. Raises `TransferError` if no uploaded file has the path `source`."""
        top = PurePosixPath(source)
        found = {path: data for path, data in self.files.items() if path == top or top in path.parents}
        if not found:
            raise TransferError(f"There is no {top} in the container.")
        await asyncio.to_thread(_write, found, top, Path(target))


class _EchoTerminal:
    """A terminal that echoes its input and then prints a prompt, without running anything."""

    def __init__(self) -> None:
        self._printed: asyncio.Queue[bytes] = asyncio.Queue()
        self._printed.put_nowait(b"$ ")

    async def read(self) -> bytes:
        return await self._printed.get()

    async def write(self, data: bytes) -> None:
        self._printed.put_nowait(data.replace(b"\r", b"\r\n") + b"$ ")

    async def close(self) -> None: ...


def _read(source: Path, target: PurePosixPath) -> dict[PurePosixPath, bytes]:
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    return {target / path.relative_to(source): path.read_bytes() for path in files}


def _write(files: dict[PurePosixPath, bytes], source: PurePosixPath, target: Path) -> None:
    for path, data in files.items():
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
