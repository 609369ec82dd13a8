"""The container behind a sandbox: every request gets a separate shell in it."""

import asyncio
import contextlib
import hashlib
import secrets
import shlex
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ares_exp import DockerContainerFactory, LocalContainerFactory
from ares_exp.cancellation import in_thread
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.container import DockerContainer
from ares_exp.containers.docker.image import image_tag
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.local.container import LocalContainer
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC
from ares_exp.containers.shell_channel import ChannelStream
from ares_exp.containers.terminal import Terminal
from ares_exp.errors import ContainerError, ContainerStartError
from tests.leaks import own_directory

Backend = Literal["local", "docker"]
_NAME = "daytona"
UNKNOWN_REGISTRY = ".invalid/"
"""No image is found in a registry of such a name."""


@dataclass(frozen=True)
class Source:
    """What the files of a sandbox come from.

    Attributes:
        dockerfile: Text of a Dockerfile.
        changes: What differs from it.
    """

    dockerfile: str
    changes: StoredChanges | None = None


class Lines:
    """What a stream says, by lines and by pieces."""

    def __init__(self, stream: ChannelStream) -> None:
        self._stream = stream
        self._ahead = b""

    async def line(self) -> bytes:
        """Up to a newline, without it; less at the end."""
        while b"\n" not in self._ahead and (data := await self._read()):
            self._ahead += data
        line, _, self._ahead = self._ahead.partition(b"\n")
        return line

    async def rest(self) -> AsyncIterator[bytes]:
        """All that follows."""
        data, self._ahead = self._ahead, b""
        while data or (data := await self._read()):
            yield data
            data = b""

    async def _read(self) -> bytes:
        try:
            return await self._stream.read()
        except OSError:
            return b""


class Box:
    """One running container.

    Attributes:
        workdir: Directory in which commands start.
    """

    def __init__(self, container: LocalContainer | DockerContainer, user: str | None) -> None:
        self._container = container
        self._running = container._started if isinstance(container, DockerContainer) else container
        self._user = user
        self.workdir = self._running._workdir

    async def open_shell(self) -> ChannelStream:
        """A fresh `sh` of the sandbox's user."""
        running = self._running
        return await (running._open_shell if isinstance(running, LocalContainer) else running.open_shell)(self._user)

    async def open_terminal(self, *, columns: int, lines: int) -> Terminal:
        return await self._container.open_terminal(columns=columns, lines=lines, user=self._user)

    async def set_network(self, *, blocked: bool) -> None:
        """Cuts it off, or lets it out."""
        await self._container.set_network(NO_NETWORK if blocked else PUBLIC)

    async def changes(self, objects: ObjectStore) -> StoredChanges:
        """What its files are by now, relative to what it is made from."""
        return StoredChanges(await self._container.capture_changes(objects), objects)

    async def stop(self) -> None:
        await self._container.stop()


class Boxes:
    """Makes boxes of one backend.

    Attributes:
        objects: The contents of files that snapshots and forks keep.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._factory = DockerContainerFactory() if backend == "docker" else LocalContainerFactory()
        self._folder = Path()
        self._is_open = False
        self._built: set[str] = set()

    async def open(self) -> None:
        """Makes a directory for build contexts and for the files of snapshots."""
        self._folder, self._is_open = own_directory("daytona-emulator"), True
        self.objects = ObjectStore(self._folder / "objects")
        if self._backend == "docker":
            await self._factory.preflight()

    async def start(self, source: Source, params: Mapping[str, Any], *, blocked: bool) -> Box:
        """A box that runs, with the variables, resources and user of a CreateSandbox."""
        if UNKNOWN_REGISTRY in source.dockerfile.partition("\n")[0]:
            raise ContainerStartError(f"failed to pull {source.dockerfile.split()[1]}: not found")
        image, context, memory_gib = self._plain_image(source), None, params.get("memory")
        if image is None:
            context = await in_thread(partial(self._context, source))
            self._built.add(await in_thread(partial(image_tag, _NAME, context)))
        container = self._factory(
            ContainerSpec(
                name=_NAME,
                docker_image=image,
                context_dir=context,
                env=params.get("env") or {},
                network=NO_NETWORK if blocked else PUBLIC,
                phase_networks=frozenset({NO_NETWORK, PUBLIC}),
                cpus=params.get("cpu"),
                memory_mb=memory_gib and memory_gib * 1024,
                changes=source.changes,
            )
        )
        assert isinstance(container, LocalContainer | DockerContainer)
        await container.start()
        return Box(container, params.get("user"))

    async def close(self) -> None:
        """Removes the directory, and the images that were built. Idempotent."""
        if self._backend == "docker":
            await asyncio.to_thread(self._remove_images)
        if self._is_open:
            self._is_open = False
            await asyncio.to_thread(shutil.rmtree, self._folder)

    def _plain_image(self, source: Source) -> str | None:
        words = source.dockerfile.split()
        is_plain = self._backend == "docker" and len(words) == 2 and words[0].upper() == "FROM"
        return words[1] if is_plain else None

    def _context(self, source: Source) -> Path:
        """A directory with the Dockerfile. Nothing else is in it: no files come with a request."""
        folder = self._folder / "contexts" / hashlib.sha256(source.dockerfile.encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "Dockerfile"
        if not file.exists():
            new = self._folder / secrets.token_hex(8)  # outside the context, which other users read
            new.write_text(source.dockerfile)
            new.rename(file)
        return folder

    def _remove_images(self) -> None:
        import docker

        client = docker.from_env()
        try:
            for image in self._built:
                try:
                    client.images.remove(image)
                except docker.errors.APIError:
                    continue  # another process uses it, or it was never finished
        finally:
            client.close()


@contextlib.asynccontextmanager
async def shell(box: Box) -> AsyncIterator[ChannelStream]:
    """A fresh `sh` of the box."""
    stream = await box.open_shell()
    try:
        yield stream
    finally:
        stream.close()


async def run(box: Box, command: str) -> tuple[int, str]:
    """Runs `command` to its end. Returns its exit code and output."""
    key = secrets.token_hex(16)
    script = f"cd {shlex.quote(box.workdir)}; sh -c {shlex.quote(command)} 2>&1 </dev/null; "
    output = bytearray()
    async with shell(box) as stream:
        await stream.write(f"{script} echo '{key}' $?; exit\n".encode("utf-8", "replace"))
        async for data in Lines(stream).rest():
            output += data
    text, mark, code = output.rpartition(key.encode())
    if not mark:
        raise ContainerError("The box ended while a command ran.")
    return int(code), text.decode(errors="replace")
