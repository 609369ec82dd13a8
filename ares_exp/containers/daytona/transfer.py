"""File transfer of a sandbox: one tar by the service's file API, packed and unpacked by `tar` in the sandbox.

One request carries all files. Only the sandbox resolves its paths.
"""

from __future__ import annotations

import os
import posixpath
import re
import secrets
import shlex
import tempfile
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from ares_exp.cancellation import in_thread
from ares_exp.containers import archive
from ares_exp.containers.container import ExecResult
from ares_exp.containers.daytona.failures import plain
from ares_exp.containers.daytona.sandbox_scripts import Run
from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.errors import TransferError

if TYPE_CHECKING:
    from daytona import AsyncSandbox

T = TypeVar("T")

TRANSFER_TIMEOUT_SEC = 600.0
"""Bound on one upload or download."""

_SPOOL_BYTES = 8 * 1024 * 1024
_REASON_BYTES = 64 * 1024
_PACKED_BYTES = archive.MAX_BYTES + 4096 * archive.MAX_MEMBERS // 4
_PACKED = re.compile(r"(file|directory) ([0-9]{1,15})\n")


class FileTransfer:
    """Copies files into and out of one sandbox."""

    def __init__(self, service: DaytonaService, sandbox: AsyncSandbox, run: Run, directory: str) -> None:
        """Copies nothing yet.

        Args:
            service: The sandbox's service.
            sandbox: The sandbox.
            run: Runs a command in it.
            directory: An existing directory of it that only root may enter, for archives in transit.
        """
        self._service = service
        self._sandbox = sandbox
        self._run = run
        self._directory = directory
        self._done: list[str] = []

    async def upload(self, source: Path, target: str) -> None:
        """As `Container.upload`; `target` is absolute.

        Raises:
            TransferError: With the path and the reason.
            ContainerError: The sandbox is gone, or the service does not answer.
        """
        directory, name = (target, "") if source.is_dir() else posixpath.split(target)
        packed_path, into = self._new_path(), shlex.quote(directory or "/")
        with await in_thread(lambda: archive.pack(source, name)) as packed:
            await self.send(packed, packed_path)
        unpack = f"mkdir -p -- {into} && tar -xpf {packed_path} -C {into}; e=$?; rm -f {packed_path}; exit $e"
        result = await self._run(unpack, timeout_sec=TRANSFER_TIMEOUT_SEC)
        if result.exit_code != 0:
            raise TransferError(f"Cannot copy {source} to {target} in the sandbox: {_reason(result)}.")

    async def download(self, source: str, target: Path) -> None:
        """As `Container.download`; `source` is absolute.

        Raises:
            TransferError: With the path and the reason; a missing `source` included.
            ContainerError: The sandbox is gone, or the service does not answer.
        """
        packed_path, path = self._new_path(), shlex.quote(source or "/")
        directory, name = posixpath.split(source)
        parent, done, self._done = shlex.quote(directory or "/"), self._done, []
        result = await self._run(
            f"rm -f {' '.join(done)}; k= e=0; "
            f"if [ -d {path} ]; then k=directory; tar -cf {packed_path} -C {path} . 2>/dev/null || e=$?; "
            f"elif [ -e {path} ]; then k=file; "
            f"tar -chf {packed_path} -C {parent} -- {shlex.quote('./' + name)} 2>/dev/null || e=$?; "
            f'fi; [ -n "$k" ] || exit 3; [ $e -lt 2 ] || exit 4; echo "$k $(($(wc -c <{packed_path})))"',
            timeout_sec=TRANSFER_TIMEOUT_SEC,
        )
        packed = _PACKED.fullmatch(result.output)
        try:
            if result.exit_code == 3:
                raise TransferError(f"Cannot copy {source} out of the sandbox: there is no such file or directory.")
            if result.exit_code != 0 or packed is None:
                raise TransferError(f"Cannot copy {source} out of the sandbox: packing it failed.")
            size = int(packed[2])
            if size > _PACKED_BYTES:
                raise TransferError(f"Cannot copy {source} out of the sandbox: more than {archive.MAX_BYTES} bytes.")
            with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as file:
                try:
                    await self.fetch(packed_path, file, size)
                except TransferError as error:
                    raise TransferError(f"Cannot copy {source} out of the sandbox. {error}") from error
                file.seek(0)
                unpack = archive.unpack_file if packed[1] == "file" else archive.unpack_directory
                await in_thread(lambda: unpack(file, target))
        finally:
            self._done.append(packed_path)

    async def send(self, file: IO[bytes], path: str) -> None:
        """Writes the file `path` of the sandbox, in an existing directory.

        Raises:
            ContainerError: The sandbox is gone, or the service refused or does not answer.
        """
        await self._call(f"The upload to {path}", lambda: _send(self._sandbox, file, path))

    async def fetch(self, path: str, file: IO[bytes], size: int) -> None:
        """Copies a file of the sandbox to `file`.

        Raises:
            TransferError: It has another size.
            ContainerError: The sandbox is gone, or the service refused or does not answer.
        """
        received = await self._call(f"The download of {path}", lambda: _fetch(self._sandbox, path, file, size))
        if received != size:
            raise TransferError(
                f"Expected {size} bytes in {path} of the sandbox, got {'more' if received > size else received}: "
                "something there changes it, or has taken the place of its programs."
            )

    async def _call(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        what = f"{what} in sandbox {self._sandbox.name}"
        return await self._service.call(what, lambda _: request(), timeout_sec=TRANSFER_TIMEOUT_SEC)

    def _new_path(self) -> str:
        return f"{self._directory}/{secrets.token_hex(6)}.tar"


async def _send(sandbox: AsyncSandbox, file: IO[bytes], path: str) -> None:
    from daytona import FileUpload

    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    # The SDK reads a file on disk while sending it.
    source = file.read() if size <= _SPOOL_BYTES else f"/dev/fd/{file.fileno()}"
    await sandbox.fs.upload_files([FileUpload(source=source, destination=path)], timeout=int(TRANSFER_TIMEOUT_SEC))


async def _fetch(sandbox: AsyncSandbox, path: str, file: IO[bytes], size: int) -> int:
    """Writes up to `size` bytes of the answer to `file`; returns their number, or more if the answer was larger.

    The SDK's downloads do not distinguish a refusal from a broken connection, and read error answers without bound.
    """
    from daytona._utils.errors import intercept_errors
    from daytona_toolbox_api_client_async.exceptions import ApiException

    @intercept_errors()
    async def request() -> int:
        received = 0
        answer: Any = await sandbox.fs._api_client.download_file_without_preload_content(
            path=path, _request_timeout=TRANSFER_TIMEOUT_SEC
        )
        async with answer:
            if answer.status != HTTPStatus.OK:
                said = await answer.content.read(_REASON_BYTES)
                raise ApiException(http_resp=answer, body=said.decode("utf-8", "replace"))
            async for piece in answer.content.iter_any():
                received += len(piece)
                if received > size:
                    answer.close()
                    break
                file.write(piece)
        return received

    file.seek(0)
    file.truncate()
    return await request()


def _reason(result: ExecResult) -> str:
    return plain(result.output.strip()[-1000:]) or f"exit code {result.exit_code}"
