"""File transfer into and out of a sandbox, as one tar archive through the service's file API and the sandbox's `tar`.

One request transfers all files. Paths and links in the sandbox are resolved only by programs in the sandbox.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import secrets
import shlex
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ares_exp.cancellation import in_thread
from ares_exp.containers import archive
from ares_exp.containers.container import ExecResult
from ares_exp.containers.daytona.failures import plain
from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.errors import ContainerError, TransferError

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

Run = Callable[..., Awaitable[ExecResult]]
"""Function that runs a command as root with `sh -c`. Takes `timeout_sec`, and raises the errors of `Container.exec`."""

_TIMEOUT_SEC = 600
_SPOOL_BYTES = 8 * 1024 * 1024
_PACKED_BYTES = archive.MAX_BYTES + 4096 * archive.MAX_MEMBERS // 4
_PACKED = re.compile(r"(file|directory) ([0-9]{1,15})\n")


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """Copies files into and out of one sandbox. Paths in the sandbox are absolute.

    Attributes:
        service: The sandbox's service.
        sandbox: The sandbox.
        run: Function that runs a command in the sandbox.
        directory: Existing directory in the sandbox for temporary archives. Only root may enter it.
    """

    service: DaytonaService
    sandbox: AsyncSandbox
    run: Run
    directory: str

    async def upload(self, source: Path, target: str) -> None:
        directory, name = (target, "") if source.is_dir() else posixpath.split(target)
        packed_path, into = self._new_path(), shlex.quote(directory or "/")
        with await in_thread(lambda: archive.pack(source, name)) as packed:
            await self._send(packed, packed_path)
        unpack = f"mkdir -p -- {into} && tar -xpf {packed_path} -C {into}; e=$?; rm -f {packed_path}; exit $e"
        result = await self.run(unpack, timeout_sec=_TIMEOUT_SEC)
        if result.exit_code != 0:
            reason = plain(result.output.strip()[-1000:]) or f"exit code {result.exit_code}"
            raise TransferError(f"Cannot copy {source} to {target} in the sandbox: {reason}.")

    async def download(self, source: str, target: Path) -> None:
        packed_path, path = self._new_path(), shlex.quote(source or "/")
        directory, name = posixpath.split(source)
        parent = shlex.quote(directory or "/")
        result = await self.run(
            "k= e=0; "
            f"if [ -d {path} ]; then k=directory; tar -cf {packed_path} -C {path} . 2>/dev/null || e=$?; "
            f"elif [ -e {path} ]; then k=file; "
            f"tar -chf {packed_path} -C {parent} -- {shlex.quote('./' + name)} 2>/dev/null || e=$?; "
            f'fi; [ -n "$k" ] || exit 3; [ $e -lt 2 ] || exit 4; echo "$k $(($(wc -c <{packed_path})))"',
            timeout_sec=_TIMEOUT_SEC,
        )
        packed = _PACKED.fullmatch(result.output)
        try:
            if result.exit_code == 3:
                raise TransferError(f"Cannot copy {source} out of the sandbox: the path does not exist.")
            if result.exit_code != 0 or packed is None:
                raise TransferError(f"Cannot copy {source} out of the sandbox: `tar` cannot pack it.")
            size = int(packed[2])
            if size > _PACKED_BYTES:
                raise TransferError(f"Cannot copy {source} out of the sandbox: it exceeds {archive.MAX_BYTES} bytes.")
            with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as file:
                try:
                    await self._fetch(packed_path, file, size)
                except TransferError as error:
                    raise TransferError(f"Cannot copy {source} out of the sandbox. {error}") from error
                file.seek(0)
                unpack = archive.unpack_file if packed[1] == "file" else archive.unpack_directory
                await in_thread(lambda: unpack(file, target))
        finally:
            with contextlib.suppress(ContainerError):
                await self.run(f"rm -f {packed_path}", timeout_sec=_TIMEOUT_SEC)

    async def _send(self, file: IO[bytes], path: str) -> None:
        from daytona import FileUpload

        async def send(_: AsyncDaytona) -> None:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            # The SDK reads a file on disk while sending it.
            source = file.read() if size <= _SPOOL_BYTES else f"/dev/fd/{file.fileno()}"
            await self.sandbox.fs.upload_files([FileUpload(source=source, destination=path)], timeout=_TIMEOUT_SEC)

        what = f"The upload to {path} in sandbox {self.sandbox.name}"
        await self.service.call(what, send, timeout_sec=_TIMEOUT_SEC)

    async def _fetch(self, path: str, file: IO[bytes], size: int) -> None:
        """Copies a file of `size` bytes from the sandbox to `file`."""
        from aiohttp import ClientError, ClientResponseError
        from daytona import DaytonaConnectionError, DaytonaError

        async def fetch(_: AsyncDaytona) -> int:
            file.seek(0)
            file.truncate()
            try:
                pieces: Any = await self.sandbox.fs.download_file_stream(path, timeout=_TIMEOUT_SEC)
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        file.write(piece)
                        if file.tell() > size:
                            break
            except ClientResponseError as error:  # the SDK passes on errors that follow its first response
                raise DaytonaError(error.message, error.status, error.headers) from error
            except ClientError as error:
                raise DaytonaConnectionError(str(error)) from error
            return file.tell()

        what = f"The download of {path} in sandbox {self.sandbox.name}"
        received = await self.service.call(what, fetch, timeout_sec=_TIMEOUT_SEC)
        if received != size:
            raise TransferError(
                f"The size of {path} in the sandbox changed from {size} bytes during the download. A process may be "
                "changing the file, or may have replaced the programs that read it."
            )

    def _new_path(self) -> str:
        return f"{self.directory}/{secrets.token_hex(6)}.tar"
