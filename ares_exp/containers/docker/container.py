"""One container of a Docker engine."""

from __future__ import annotations

import asyncio
import posixpath
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ares_exp.containers.container import Container, ContainerSpec, ExecOptions, ExecResult, Shell, User
from ares_exp.containers.container_start import bounded_start, refuse_second_start
from ares_exp.containers.docker.capture import CaptureWay
from ares_exp.containers.docker.changed_files import ChangedFiles
from ares_exp.containers.docker.creation import AnswerLostError, create, remove_when_it_appears, starts
from ares_exp.containers.docker.death import DeathWatch
from ares_exp.containers.docker.engine import Engine, connect, engine_errors, in_thread, reason
from ares_exp.containers.docker.image import ensure_image
from ares_exp.containers.docker.life import FIRST_COMMAND, NAME_PREFIX, FirstProcess, remove
from ares_exp.containers.docker.limits import limits
from ares_exp.containers.docker.network import ContainerNetwork, NetworkOptions
from ares_exp.containers.docker.stream import EngineStream
from ares_exp.containers.docker.transfer import get, put
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.containers.ownership import owner_labels
from ares_exp.containers.shell_pool import ShellPool
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerStartError,
    PreflightError,
    SnapshotError,
    TransferError,
    UnsupportedTaskError,
)
from ares_exp.filesystem.delta import Delta
from ares_exp.filesystem.objects import ObjectStore

if TYPE_CHECKING:
    from docker import APIClient

_WHEN_SLOW = "Raise build_timeout_sec in the [environment] table of its task.toml, or build the image before."


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """What is the same for every container of a factory; see `DockerContainerFactory`."""

    network: NetworkOptions
    shell: Shell
    keep_image: bool
    env: Mapping[str, str]
    pids_limit: int
    swap_mb: int
    no_new_privileges: bool
    capture: CaptureWay


class DockerContainer(Container):
    """One container; a `Container`, and a `SnapshottableContainer`."""

    image: str | None = None

    def __init__(self, spec: ContainerSpec, options: DockerOptions) -> None:
        """Keeps what is needed to start."""
        self._spec = spec
        self._options = options
        slug = re.sub(r"[^a-zA-Z0-9]+", "-", spec.name).strip("-")[:40] or "task"
        self.container_name = f"{NAME_PREFIX}{slug}-{secrets.token_hex(6)}"
        self._engine: Engine | None = None
        self._may_appear = False
        self._first_process: FirstProcess | None = None
        self._death: DeathWatch | None = None
        keep = options.keep_image
        self._changed_files = ChangedFiles(spec, self.container_name, options.capture, keep_image=keep)
        self._network = ContainerNetwork(spec, options.network)
        self._channels: ShellPool | None = None
        self._default_user = ""
        self._workdir = "/"
        self._stopped = False

    async def start(self) -> None:
        """As `Container.start`."""
        refuse_second_start(begun=self._engine is not None or self._stopped)
        what = f"The container of {self._spec.name}"
        failures: tuple[type[Exception], ...] = (*engine_errors(), PreflightError, UnsupportedTaskError)
        async with bounded_start(what, self._spec.start_timeout_sec, stop=self.stop, remedy=_WHEN_SLOW):
            try:
                await self._start()
            except failures as error:
                why = reason(error)
                needs = " The image has to have a `sh`." if 'exec: "sh"' in why else ""
                raise ContainerStartError(f"{what} could not be started: {why}.{needs}") from error

    async def _start(self) -> None:
        from docker.errors import ImageNotFound

        spec = self._spec
        engine = self._engine = await connect()
        try:
            self._first_process = await self._create_and_start(engine)
        except ImageNotFound:  # the end of another container took it along (`keep_image=False`) before this one had it
            self._first_process = await self._create_and_start(engine)
        await self._network.start(engine, self.container_name)
        self._death = DeathWatch(engine, self.container_name, self._first_process)
        root = None if self._default_user in ("root", "0") else "root"
        self._channels = ShellPool(self._open_shell, workdir=spec.workdir, shell=self._options.shell, root=root)
        try:
            await self._open_shells(self._channels)
        except ContainerError as error:
            raise ContainerStartError(f"The container of {spec.name} started, but runs no commands. {error}") from error

    async def _create_and_start(self, engine: Engine) -> FirstProcess:
        spec = self._spec
        if spec.changes is not None:
            image, self.image = await self._changed_files.image(engine)
        else:
            image = self.image = await ensure_image(
                engine,
                name=spec.name,
                docker_image=spec.docker_image,
                context_dir=spec.context_dir,
                keep=self._options.keep_image,
            )
        async with starts(engine).slot():
            await in_thread(lambda: self._create(engine, image), lane="starts")
            first_process = self._first_process = await FirstProcess.attach(engine, self.container_name)
            await in_thread(lambda: engine.api.start(self.container_name), lane="starts")
        await self._changed_files.has_started(engine)
        return first_process

    def _create(self, engine: Engine, image: str) -> None:
        spec, options = self._spec, self._options
        host_config = engine.api.create_host_config(
            auto_remove=True,
            **self._network.create_options,
            security_opt=["no-new-privileges:true"] if options.no_new_privileges else None,
            **limits(spec, engine.capabilities, swap_mb=options.swap_mb, pids_limit=options.pids_limit),
        )
        request = engine.api.create_container_config(
            image,
            FIRST_COMMAND,
            labels=owner_labels(),
            environment={**options.env, **spec.env},
            stdin_open=True,  # together with an attached stdin docker-py makes this OpenStdin and StdinOnce
            host_config=host_config,
        )
        try:
            create(engine, self.container_name, request)
        except AnswerLostError:
            self._may_appear = True
            raise
        config = engine.api.inspect_container(self.container_name)["Config"]
        self._default_user = config["User"] or "root"
        self._workdir = spec.workdir or config["WorkingDir"] or "/"

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """As `Container.exec`.

        Raises:
            ContainerDiedError: The container ended or no longer answers.
            ContainerError: It has no such user.
            ValueError: As `Container.exec`.
        """
        if self._channels is None:
            raise ContainerDiedError("The container has not been started.")
        if str(options.get("user")) == self._default_user:
            options["user"] = None  # the same shells
        options["env"] = {**self._network.env, **(options.get("env") or {})}
        try:
            return await self._channels.exec(command, **options)
        except ContainerError as error:
            await self._raise_if_dead(error)
            raise

    async def _open_shells(self, channels: ShellPool) -> None:
        try:
            await channels.open()
        except ContainerError as error:
            await self._raise_if_dead(error)
            raise

    async def _open_shell(self, user: User | None) -> EngineStream:
        engine = self._running_engine()
        name, as_user = self.container_name, "" if user is None else str(user)
        try:
            created = await in_thread(
                lambda: engine.api.exec_create(name, ["sh"], stdin=True, user=as_user), abandon=True
            )
            connection = await engine.hijack(f"/exec/{created['Id']}/start", {"Detach": False, "Tty": False})
        except engine_errors() as error:
            raise ContainerError(
                f"No shell could be opened in the container of {self._spec.name}"
                f"{f' as user {as_user!r}' if as_user else ''}: {reason(error)}."
            ) from error
        return EngineStream(*connection)

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """As `Container.upload`.

        Raises:
            TransferError: With the path and the reason.
            ContainerDiedError: The container is gone.
        """
        source, path = Path(source), posixpath.join(self._workdir, str(target))
        directory, name = (path, "") if source.is_dir() else posixpath.split(path)
        made = await self.exec(
            f"mkdir -p -- {shlex.quote(directory)}", user="root", cwd="/", timeout_sec=60, shell="sh -c"
        )
        if made.exit_code != 0:
            raise TransferError(f"Cannot upload {source} to {path}: {made.output.strip()}.")
        await self._transfer(lambda api: put(api, self.container_name, source, directory, name), f"upload to {path}")

    async def download(self, source: str | Path, target: str | Path) -> None:
        """As `Container.download`.

        Raises:
            TransferError: With the path and the reason; a missing `source` included.
            ContainerDiedError: The container is gone.
        """
        path = posixpath.join(self._workdir, str(source))
        await self._transfer(lambda api: get(api, self.container_name, path, Path(target)), f"download of {path}")

    async def _transfer(self, copy: Callable[[APIClient], None], what: str) -> None:
        engine = self._running_engine()
        failures: tuple[type[Exception], ...] = (*engine_errors(), TransferError)
        try:
            await in_thread(lambda: copy(engine.api), lane="transfers")
        except failures as error:
            await self._raise_if_dead(error)
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"The {what} failed: {reason(error)}.") from error

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        """As `SnapshottableContainer.capture_changes`; see `capture` for the ways.

        Raises:
            CaptureError: The files could not be read.
            SnapshotUnsupportedError: They cannot be read in the way that the option `capture` asks for.
            ContainerDiedError: The container is gone.
        """
        self._running_engine()
        try:
            return await self._changed_files.capture(objects)
        except SnapshotError as error:
            await self._raise_if_dead(error)
            raise

    async def set_network(self, policy: NetworkPolicy) -> None:
        """As `Container.set_network`.

        Raises:
            ContainerDiedError: The container is gone.
            ContainerError: The policy could not be put in force.
            ValueError: As `Container.set_network`.
        """
        self._running_engine()
        try:
            await self._network.set(policy)
        except ContainerError as error:
            await self._raise_if_dead(error)
            raise

    def _running_engine(self) -> Engine:
        if self._engine is None or self._stopped:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        return self._engine

    async def _raise_if_dead(self, cause: Exception) -> None:
        """Tells a dead container from a refused request, and why it died."""
        self._running_engine()  # one that was stopped says that
        dead = await self._death.cause() if self._death is not None else None
        if dead is not None:
            seen = self._first_process.epitaph() if self._first_process is not None else ""
            raise ContainerDiedError(f"The container of {self._spec.name} {dead}.{seen}") from cause

    async def stop(self) -> None:
        """As `Container.stop`."""
        self._stopped = True
        if self._death is not None:
            self._death.close()
        try:
            if self._channels is not None:
                await self._channels.close()
            if self._engine is not None:
                engine = self._engine
                is_ours_to_remove = self._spec.docker_image is None and not self._options.keep_image
                image = self.image if is_ours_to_remove else None
                await in_thread(lambda: remove(engine, self.container_name, image), lane="removals")
                if self._may_appear:
                    await in_thread(lambda: remove_when_it_appears(engine, self.container_name), lane="removals")
        finally:
            if self._first_process is not None:
                self._first_process.close()
            await asyncio.gather(self._network.close(), self._changed_files.close())
