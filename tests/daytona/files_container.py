"""A box of ours that is captured as a sandbox of the service is: by commands in it, and files in and out of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Unpack

from ares_exp.containers.container import Container, ContainerSpec, ExecOptions, ExecResult
from ares_exp.containers.daytona.capture import SandboxFiles
from ares_exp.containers.filesystem.delta import Delta, DeltaLimits
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.errors import ContainerDiedError, TransferError

BASE = "daytona:image=test"


class FilesBox(Container):
    """A box in which `SandboxFiles` does what the backend of the box does otherwise."""

    def __init__(self, spec: ContainerSpec, inner: Container, *, base: str = BASE, prepare: str = "") -> None:
        """`inner` was made without the changes of `spec`; `prepare` runs in it before anything else."""
        self.inner = inner
        self.fetched_bytes = 0
        self.garble: Callable[[str, bytes], bytes] = lambda path, data: data
        self._prepare = prepare
        self._lives = False
        self.files = SandboxFiles(
            spec, base=base, run=self.run, fetch=self.fetch, send=self.send, skip=["/relay"], limits=DeltaLimits()
        )

    @property
    def image(self) -> str | None:
        return self.inner.image

    async def start(self) -> None:
        await self.inner.start()
        self._lives = True
        try:
            if self._prepare:
                result = await self.run(self._prepare, timeout_sec=60)
                assert result.exit_code == 0, result.output
            await self.files.has_started()
        except BaseException:
            await self.stop()
            raise

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        return await self.inner.exec(command, **options)

    async def upload(self, source: str | Path, target: str | Path) -> None:
        await self.inner.upload(source, target)

    async def download(self, source: str | Path, target: str | Path) -> None:
        await self.inner.download(source, target)

    async def stop(self) -> None:
        self._lives = False
        await self.inner.stop()

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        try:
            return await self.files.capture(objects)
        except Exception as error:
            if not self._lives:
                raise ContainerDiedError("The box has been stopped.") from error
            raise

    async def run(self, command: str, *, timeout_sec: float) -> ExecResult:
        return await self.inner.exec(command, user="root", cwd="/", shell="sh -c", timeout_sec=timeout_sec)

    async def fetch(self, path: str, file: IO[bytes], max_bytes: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory, "file")
            await self.inner.download(path, target)
            data = await asyncio.to_thread(target.read_bytes)
        if len(data) > max_bytes:
            raise TransferError(f"{path} has more than {max_bytes} bytes.")
        self.fetched_bytes += len(data)
        file.write(self.garble(path, data))

    async def send(self, file: IO[bytes], path: str) -> None:
        with tempfile.NamedTemporaryFile() as source:
            source.write(self.garble(path, file.read()))
            source.flush()
            await self.inner.upload(source.name, path)
