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
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from ares_exp.containers.cancellation import finish
from ares_exp.containers.container import ContainerSpec, ExecOptions, ExecResult, NetworkMode, User
from ares_exp.containers.docker.engine import Engine, connect, engine_errors, in_thread, reason
from ares_exp.containers.docker.image import ensure_image
from ares_exp.containers.docker.life import FIRST_COMMAND, FirstProcess, cause_of_death, owner_labels, remove
from ares_exp.containers.docker.stream import EngineStream
from ares_exp.containers.docker.transfer import get, put
from ares_exp.containers.shell_channel import ShellChannels
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerStartError,
    EnvironmentStartTimeoutError,
    PreflightError,
    TransferError,
)

if TYPE_CHECKING:
    from docker import APIClient

_MiB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """What is the same for every container of a factory; see `DockerContainerFactory`."""

    network: NetworkMode | None
    login_shell: bool
    keep_image: bool
    env: Mapping[str, str]
    extra_hosts: Mapping[str, str]
    pids_limit: int


class DockerContainer:
    """One container; a `Container`."""

    def __init__(self, spec: ContainerSpec, options: DockerOptions) -> None:
        """Keeps what is needed to start."""
        self._spec = spec
        self._options = options
        slug = re.sub(r"[^a-zA-Z0-9]+", "-", spec.name).strip("-")[:40] or "task"
        self.container_name = f"ares-exp-{slug}-{secrets.token_hex(6)}"
        self._engine: Engine | None = None
        self.image: str | None = None
        self._first_process: FirstProcess | None = None
        self._channels: ShellChannels | None = None
        self._default_user = ""
        self._workdir = "/"
        self._stopped = False

    async def start(self) -> None:
        """As `Container.start`."""
        if self._engine is not None or self._stopped:
            raise ContainerStartError("A container is started once; this one has been started or stopped before.")
        timer = asyncio.timeout(self._spec.start_timeout_sec)
        try:
            async with timer:
                await self._start()
        except BaseException as error:
            await finish(self.stop())
            if timer.expired() and isinstance(error, TimeoutError):
                raise EnvironmentStartTimeoutError(
                    f"The container of {self._spec.name} did not start within {self._spec.start_timeout_sec:g} s. "
                    "Raise build_timeout_sec in the [environment] table of its task.toml, or build the image before."
                ) from error
            if isinstance(error, (*engine_errors(), PreflightError)):
                raise ContainerStartError(
                    f"The container of {self._spec.name} could not be started: {reason(error)}."
                ) from error
            raise

    async def _start(self) -> None:
        spec = self._spec
        engine = self._engine = await connect()
        image = await ensure_image(
            engine.api, name=spec.name, docker_image=spec.docker_image, context_dir=spec.context_dir
        )
        self.image = image
        await in_thread(lambda: self._create(engine, image))
        self._first_process = await FirstProcess.attach(engine, self.container_name)
        await in_thread(lambda: engine.api.start(self.container_name))
        self._channels = ShellChannels(self._open_shell, workdir=spec.workdir, login_shell=self._options.login_shell)
        try:
            await self.exec(":", cwd="/")
        except ContainerError as error:
            raise ContainerStartError(f"The container of {spec.name} started, but runs no commands. {error}") from error

    def _create(self, engine: Engine, image: str) -> None:
        spec, options = self._spec, self._options
        network = options.network or spec.network
        limits: dict[str, Any] = {}
        if spec.cpus is not None:  # the engine refuses more than it has
            limits["nano_cpus"] = int(min(spec.cpus, engine.cpus) * 1e9)
        if spec.memory_mb is not None:
            limits["mem_limit"] = limits["memswap_limit"] = spec.memory_mb * _MiB
        host_config = engine.api.create_host_config(
            auto_remove=True,
            network_mode="none" if network == "no-network" else None,
            extra_hosts=dict(options.extra_hosts) if network == "public" else None,
            pids_limit=options.pids_limit,
            **limits,
        )
        engine.api.create_container(
            image,
            FIRST_COMMAND,
            name=self.container_name,
            labels=owner_labels(),
            environment={**options.env, **spec.env},
            stdin_open=True,  # together with an attached stdin docker-py makes this OpenStdin and StdinOnce
            host_config=host_config,
        )
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
        try:
            return await self._channels.exec(command, **options)
        except ContainerError as error:
            await self._raise_if_dead(error)
            raise

    async def _open_shell(self, user: User | None) -> EngineStream:
        engine = self._running_engine()
        name, as_user = self.container_name, "" if user is None else str(user)
        try:
            created = await in_thread(lambda: engine.api.exec_create(name, ["sh"], stdin=True, user=as_user))
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
        made = await self.exec(f"mkdir -p -- {shlex.quote(directory)}", user="root", cwd="/", timeout_sec=60)
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
            await in_thread(lambda: copy(engine.api))
        except failures as error:
            await self._raise_if_dead(error)
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"The {what} failed: {reason(error)}.") from error

    def _running_engine(self) -> Engine:
        if self._engine is None or self._stopped:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        return self._engine

    async def _raise_if_dead(self, cause: Exception) -> None:
        """Tells a dead container from a refused request, and why it died."""
        engine = self._running_engine()
        dead = await in_thread(lambda: cause_of_death(engine, self.container_name))
        if dead is not None:
            seen = self._first_process.epitaph() if self._first_process is not None else ""
            raise ContainerDiedError(f"The container of {self._spec.name} {dead}.{seen}") from cause

    async def stop(self) -> None:
        """As `Container.stop`."""
        self._stopped = True
        try:
            if self._channels is not None:
                await self._channels.close()
            if self._engine is not None:
                engine, image = self._engine, self._image_to_remove()
                await in_thread(lambda: remove(engine, self.container_name, image))
        finally:
            if self._first_process is not None:
                self._first_process.close()

    def _image_to_remove(self) -> str | None:
        return self.image if self._spec.docker_image is None and not self._options.keep_image else None

    async def __aenter__(self) -> Self:
        """Starts the container."""
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops the container."""
        await self.stop()
