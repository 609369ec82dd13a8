"""Scripts run as root in a sandbox, and the files that they write and read."""

from __future__ import annotations

import asyncio
import gzip
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import IO, cast

from ares_exp.containers.bounded_reading import READ_SEC
from ares_exp.containers.container import ExecResult

_GZIP = b"\x1f\x8b"
_SHOWN = 500


Run = Callable[..., Awaitable[ExecResult]]
"""Runs a command as root, by `sh -c`, with the keyword `timeout_sec`. Raises as `Container.exec`."""

Fetch = Callable[[str, IO[bytes], int], Awaitable[None]]
"""Copies a file of the sandbox, of at most so many bytes, to an open file.

Raises `ContainerError` if it is missing or larger, if the sandbox is gone, or if the service does not answer.
"""

Send = Callable[[IO[bytes], str], Awaitable[None]]
"""Writes all of an open file to a file of the sandbox, in an existing directory.

Raises `ContainerError` if the sandbox is gone, or if the service refuses or does not answer.
"""


class ScriptFailedError(Exception):
    """A script in the sandbox failed.

    Attributes:
        exit_code: Its exit code; `None` after its time limit.
    """

    def __init__(self, reason: str, exit_code: int | None) -> None:
        """Args: reason: A part of a sentence. exit_code: As the attribute."""
        super().__init__(reason)
        self.exit_code = exit_code


class SandboxScripts:
    """Scripts and file transfer of one sandbox, for capture and restore."""

    def __init__(self, run: Run, fetch: Fetch, send: Send) -> None:
        self._run, self._fetch, self._send = run, fetch, send

    async def run(self, script: str) -> str:
        """Runs a script and returns its output.

        Raises:
            ScriptFailedError: With its output, or after `READ_SEC`.
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
        """Fetches a file of the sandbox, uncompressed if it is a gzip file.

        Args:
            path: Its path in the sandbox.
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
        await asyncio.to_thread(file.seek, 0)
        await self._send(file, path)
