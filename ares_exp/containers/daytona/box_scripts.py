"""Scripts that root runs in a sandbox, and files that they leave there or find there."""

from __future__ import annotations

import asyncio
import gzip
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, Protocol, cast

from ares_exp.containers.bounded_reading import READ_SEC
from ares_exp.containers.container import ExecResult

_GZIP = b"\x1f\x8b"
_SHOWN = 500


class Run(Protocol):
    """Runs a command as root, by `sh -c`."""

    async def __call__(self, command: str, *, timeout_sec: float) -> ExecResult:
        """As `Container.exec`."""
        ...


class Fetch(Protocol):
    """Reads a file of the sandbox."""

    async def __call__(self, path: str, file: IO[bytes], max_bytes: int, /) -> None:
        """Writes the sandbox's file `path` to `file`.

        Raises:
            ContainerError: It is not there or larger; the sandbox is gone, or the service does not answer.
        """
        ...


class Send(Protocol):
    """Writes a file of the sandbox."""

    async def __call__(self, file: IO[bytes], path: str, /) -> None:
        """Makes the sandbox's file `path`, in a directory that is there, of all of `file`.

        Raises:
            ContainerError: The sandbox is gone, or the service refused or does not answer.
        """
        ...


class ScriptFailedError(Exception):
    """A script in the sandbox did not end well.

    Attributes:
        exit_code: Its exit code; `None` after its time limit.
    """

    def __init__(self, reason: str, exit_code: int | None) -> None:
        """`reason` is a part of a sentence."""
        super().__init__(reason)
        self.exit_code = exit_code


class BoxScripts:
    """What capturing and restoring does in one sandbox."""

    def __init__(self, run: Run, fetch: Fetch, send: Send) -> None:
        """Does nothing yet."""
        self._run, self._fetch, self._send = run, fetch, send

    async def run(self, script: str) -> str:
        """Runs a script and returns what it printed.

        Raises:
            ScriptFailedError: With what it printed, or that it took longer than `READ_SEC`.
            ContainerError: The sandbox is gone, or the service does not answer.
        """
        result = await self._run(script, timeout_sec=READ_SEC)
        if result.timed_out:
            raise ScriptFailedError(f"it took longer than {READ_SEC:g} s", None)
        if result.exit_code != 0:
            said = " ".join(result.output.split())[:_SHOWN]
            raise ScriptFailedError(said or f"a script ended with exit code {result.exit_code}", result.exit_code)
        return result.output

    @asynccontextmanager
    async def fetched(self, path: str, size: int) -> AsyncIterator[IO[bytes]]:
        """A file of the sandbox, uncompressed if it is a gzip file.

        Args:
            path: Where it is there.
            size: Its size, bytes.

        Raises:
            ContainerError: As `Fetch`.
        """
        with tempfile.TemporaryFile(prefix="ares_exp-changes-") as file:
            await self._fetch(path, file, size)
            file.seek(0)
            is_compressed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            yield cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb")) if is_compressed else file

    async def send(self, file: IO[bytes], path: str) -> None:
        """As `Send`."""
        await asyncio.to_thread(file.seek, 0)
        await self._send(file, path)
