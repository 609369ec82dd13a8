"""One local box as a `Container`.

What the box sees is in `host_root`, what it may do in `bubblewrap` and `seccomp`, what runs is in `box`; here they come
together, with the task's Dockerfile.
"""

from __future__ import annotations

import asyncio
import posixpath
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Unpack

from ares_exp.containers.cancellation import in_thread
from ares_exp.containers.container import Container, ContainerSpec, ExecOptions, ExecResult, User
from ares_exp.containers.container_start import bounded_start, refuse_second_start
from ares_exp.containers.dockerfile.reading import Dockerfile
from ares_exp.containers.dockerfile.steps import apply_step, stage_context
from ares_exp.containers.local.box import ROOT_NAMES, Box
from ares_exp.containers.local.box_directory import BoxDirectory
from ares_exp.containers.local.box_files import BoxFiles, private_mounts
from ares_exp.containers.local.box_storage import UNREADABLE, find_storage
from ares_exp.containers.local.box_transfer import receive, send
from ares_exp.containers.local.bubblewrap import box_arguments, find_bwrap, is_privileged
from ares_exp.containers.local.cgroup import Limits, lack_of_memory, lack_of_processes, make_groups
from ares_exp.containers.local.fifo_stream import FifoStream
from ares_exp.containers.local.host_root import Part, root_parts, write_layer
from ares_exp.containers.local.task_dockerfile import BASE_ENV, ONLY_ROOT, read_task_dockerfile
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.containers.shell_pool import ShellPool
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerStartError,
    SnapshotUnsupportedError,
    TransferError,
)
from ares_exp.filesystem.delta import Delta
from ares_exp.filesystem.objects import ObjectStore

TRANSFER_TIMEOUT_SEC = 600.0
"""Bound on one upload or download."""


class LocalContainer(Container):
    """One local box; a `Container`."""

    image: str | None = None

    def __init__(self, spec: ContainerSpec, *, share_network: bool, pids_limit: int | None = None) -> None:
        """Keeps what is needed to start.

        Args:
            spec: What the task asks for.
            share_network: Whether the box has the host's network instead of none.
            pids_limit: Bound on the processes of the box, where this user may make cgroups.
        """
        self._spec = spec
        self._share_network = share_network
        self._limits = Limits(spec.cpus, spec.memory_mb, pids_limit)
        self._privileged = is_privileged()
        self._directory: BoxDirectory | None = None
        self._files_in_memory = True
        self._files: BoxFiles | None = None
        self._box: Box | None = None
        self._user: User = "root"
        self._workdir = "/"
        self._channels: ShellPool | None = None
        self._stopped = False

    async def start(self) -> None:
        """Starts the box and applies the task's Dockerfile in it, or gives it the files of `ContainerSpec.changes`.

        Raises:
            ContainerStartError: bubblewrap or an instruction failed.
            EnvironmentStartTimeoutError: It took longer than the spec allows.
            TaskError: As `LocalContainerFactory.check`.
            SnapshotError: The files do not belong on this host, or could not be written; see `BoxFiles.make`.
        """
        refuse_second_start(begun=self._directory is not None or self._stopped)
        what = f"The local box of {self._spec.name}"
        async with bounded_start(what, self._spec.start_timeout_sec, stop=self.stop):
            await self._start()

    async def _start(self) -> None:
        bwrap = await in_thread(find_bwrap)
        self.image = "host"  # whatever FROM says
        dockerfile = read_task_dockerfile(self._spec)
        if dockerfile is not None:
            self._user, self._workdir = dockerfile.user, dockerfile.workdir
        self._workdir = self._spec.workdir or self._workdir
        env = {"HOME": "/root", **(dockerfile.env if dockerfile else BASE_ENV), **self._spec.env}
        try:
            storage = await in_thread(find_storage)
            self._files_in_memory = storage.in_memory
            self._directory = directory = BoxDirectory(storage.folder)
            arguments = await in_thread(
                lambda: directory.prepare(lambda path: self._prepare(path, env, is_readable=storage.is_readable))
            )
            self._box = await Box.launch(bwrap, arguments, directory.path, files_in_memory=storage.in_memory)
            if dockerfile is not None and self._spec.context_dir is not None and self._spec.changes is None:
                await self._build(dockerfile, self._spec.context_dir, directory.path / "context")
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise ContainerStartError(f"The local box of {self._spec.name} did not start: {error}.") from error
        if self._stopped:
            raise ContainerStartError(f"The local box of {self._spec.name} was stopped while it was being started.")
        root = None if self._user in ROOT_NAMES else "root"
        self._channels = ShellPool(self._open_shell, workdir=self._workdir, root=root)

    def _prepare(self, directory: Path, env: Mapping[str, str], *, is_readable: bool) -> list[str]:
        layer, channels = directory / "layer", directory / "channels"
        layer.mkdir()
        channels.mkdir()
        write_layer(layer, share_network=self._share_network)
        make_groups(directory, self._limits)
        parts = root_parts(layer, privileged=self._privileged)
        return box_arguments(
            self._make_files(directory, parts) if is_readable else self._private_files(parts),
            env=env,
            channels=channels,
            share_network=self._share_network,
            privileged=self._privileged,
        )

    def _make_files(self, directory: Path, parts: list[Part]) -> list[str]:
        """Makes what the box starts with. Returns the arguments of `bwrap` that mount it."""
        self._files = BoxFiles(directory, parts, privileged=self._privileged)
        self._files.make(self._spec.changes)
        return self._files.mounts()

    def _private_files(self, parts: list[Part]) -> list[str]:
        if self._spec.changes is not None:
            raise SnapshotUnsupportedError(f"The files of {self._spec.name} cannot be restored. {UNREADABLE}")
        return private_mounts(parts)

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        """As `SnapshottableContainer.capture_changes`.

        Raises:
            CaptureError: The files could not be read; with the path and the reason.
            SnapshotUnsupportedError: Nowhere on this machine can the files of a box be read.
            ContainerDiedError: The box is gone.
        """
        directory, files = self._directory, self._files
        if self._box is None or directory is None or self._stopped or not self._box.is_running:
            raise ContainerDiedError("The container has not been started, has ended, or has been stopped.")
        if files is None:
            raise SnapshotUnsupportedError(f"The local box of {self._spec.name} cannot be captured. {UNREADABLE}")
        try:
            return await in_thread(lambda: directory.prepare(lambda _: files.capture(objects)))
        except FileNotFoundError as error:
            raise ContainerDiedError("The container was stopped before its files could be read.") from error

    async def _build(self, dockerfile: Dockerfile, context: Path, stage: Path) -> None:
        context = await in_thread(lambda: stage_context(context, stage))
        channels = ShellPool(lambda user: self._open_shell(user, clean_env=True), shell="bash -c")

        async def run(
            command: str, *, env: Mapping[str, str] = BASE_ENV, cwd: str = "/", user: str = "root"
        ) -> ExecResult:
            return await channels.exec(command, env=env, cwd=cwd, user=user)

        try:
            for step in dockerfile.steps:
                await apply_step(step, context, run, self.upload)
        except ContainerStartError as error:
            hint = (
                ""
                if self._share_network
                else "\n(The box has no network; container.network=public gives it the host's.)"
            )
            raise ContainerStartError(f"{error}{hint}") from error
        finally:
            await channels.close()
            await in_thread(lambda: shutil.rmtree(stage, ignore_errors=True))

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """As `Container.exec`.

        Raises:
            ContainerDiedError: The box ended or no longer answers.
            ContainerError: There is no such user in the box (an ordinary user's box has root alone).
            ValueError: As `Container.exec`.
        """
        if self._channels is None:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        try:
            return await self._channels.exec(command, **options)
        except ContainerError as error:
            if explained := await self._explained(error):
                raise explained from error
            raise

    async def _open_shell(self, user: User | None, *, clean_env: bool = False) -> FifoStream:
        user = self._user if user is None else user
        if self._box is None or self._stopped:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        if not self._privileged and str(user) not in ROOT_NAMES:
            raise ContainerError(f"Expected root as the user of a command, got {user!r}. {ONLY_ROOT}")
        return await self._box.open_shell(user, clean_env=clean_env)

    async def _explained(self, error: ContainerError) -> ContainerError | None:
        """The same with its reason, where the box ended by itself or lacks something."""
        if self._box is None or self._directory is None or self._stopped:
            return None
        name, directory = self._spec.name, self._directory.path
        if await self._box.has_ended():
            return ContainerDiedError(f"The local box of {name} has ended: {self._box.why_ended()}.")
        lack = lack_of_processes(directory) or lack_of_memory(directory, holds_files=self._files_in_memory)
        return type(error)(f"{error} The reason may be that, in the local box of {name}, {lack}.") if lack else None

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """As `Container.upload`.

        Raises:
            TransferError: With the path and the reason.
            ContainerDiedError: The box is gone.
        """
        path = self._absolute(target)
        await self._transfer(lambda stream: send(stream, Path(source), path), f"upload of {source} to {path}")

    async def download(self, source: str | Path, target: str | Path) -> None:
        """As `Container.download`.

        Raises:
            TransferError: With the path and the reason; a missing `source` included.
            ContainerDiedError: The box is gone.
        """
        path = self._absolute(source)
        await self._transfer(lambda stream: receive(stream, path, Path(target)), f"download of {path} to {target}")

    async def _transfer(self, copy: Callable[[FifoStream], Awaitable[None]], what: str) -> None:
        stream = await self._open_shell("root", clean_env=True)
        try:
            async with asyncio.timeout(TRANSFER_TIMEOUT_SEC):
                await copy(stream)
        except OSError as error:
            raise TransferError(f"The {what} broke off: {error or f'over {TRANSFER_TIMEOUT_SEC:.0f} s'}.") from error
        finally:
            stream.close()

    async def set_network(self, policy: NetworkPolicy) -> None:
        """As `Container.set_network`: changes nothing, for every phase has the network that the box started with.

        Raises:
            ValueError: As `Container.set_network`.
        """
        if policy not in self._spec.networks:
            raise ValueError(f"Expected one of the policies that the box was made for, got {policy}.")

    def _absolute(self, path: str | Path) -> str:
        return posixpath.join("/", self._workdir, str(path))

    async def stop(self) -> None:
        """Kills the box and deletes its directory. Idempotent."""
        self._stopped = True
        try:
            if self._channels is not None:
                await self._channels.close()
        finally:
            try:
                if self._box is not None:
                    await self._box.kill()
            finally:
                if self._directory is not None:
                    await in_thread(self._directory.remove)
