"""Containers of a Docker engine: the base class, and the container that is created from one image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ares_exp import cancellation
from ares_exp.containers.container import (
    Container,
    ContainerSpec,
    ExecOptions,
    ExecResult,
    Shell,
    User,
    bounded_start,
    find_missing_glibc,
)
from ares_exp.containers.docker.capabilities import limits
from ares_exp.containers.docker.capture import Capture, CaptureWay
from ares_exp.containers.docker.changed_files import find_base, name_of, put_back
from ares_exp.containers.docker.container_lifetime import (
    FIRST_COMMAND,
    FirstProcess,
    create,
    remove,
    starts,
)
from ares_exp.containers.docker.engine import Engine, connect, engine_errors, in_thread, reason, why_unreachable
from ares_exp.containers.docker.image import ensure_image
from ares_exp.containers.docker.mounts import container_mounts
from ares_exp.containers.docker.network import ContainerNetwork, NetworkOptions
from ares_exp.containers.docker.reaper import watch_over_us
from ares_exp.containers.docker.running import RunningContainer
from ares_exp.containers.docker.transfer import exists
from ares_exp.containers.filesystem.delta import Delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.forwarded_port import FORWARDED_PORT, ForwardedPort, Serve
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.containers.ownership import owner_labels, unique_name
from ares_exp.containers.terminal import Terminal
from ares_exp.errors import (
    AgentInstallError,
    ContainerDiedError,
    ContainerError,
    ContainerStartError,
    PreflightError,
    SnapshotError,
    TaskError,
)

if TYPE_CHECKING:
    from docker.types import Mount

WHEN_SLOW = "Set `timeouts.build_multiplier=2` to double the limit, or pull or build the image before the run."


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """The factory's options for all of its containers. `DockerContainerFactory` describes them."""

    host: str | None
    network: NetworkOptions
    shell: Shell
    keep_image: bool
    env: Mapping[str, str]
    pids_limit: int
    swap_mb: int
    no_new_privileges: bool
    capture: CaptureWay
    compose_max_containers: int
    compose_max_memory_mb: int
    compose_trusted: bool


class EngineContainer(Container):
    """A container of a Docker engine. Subclasses define how it is started (`_start`) and removed (`_remove`)."""

    image: str | None = None

    def __init__(self, spec: ContainerSpec, options: DockerOptions) -> None:
        self._spec = spec
        self._options = options
        self._engine: Engine | None = None
        self._first_process: FirstProcess | None = None
        self._network = ContainerNetwork(spec, options.network)
        self._running: RunningContainer | None = None
        self._stopped = False

    async def start(self) -> None:
        what, started = f"The container of {self._spec.name}", self._engine is not None or self._stopped
        limit = self._spec.start_timeout_sec
        async with bounded_start(what, limit, started=started, stop=self.stop, remedy=WHEN_SLOW):
            try:
                engine = self._engine = await connect(self._options.host)
                await self._start(engine)
            except engine_errors(PreflightError, TaskError) as error:
                gone = await why_unreachable(self._options.host) if isinstance(error, engine_errors()) else ""
                why = gone or reason(error)
                needs = " The image needs a `sh`." if 'exec: "sh"' in why else ""
                raise ContainerStartError(f"{what} could not be started: {why}.{needs}") from error

    async def _start(self, engine: Engine) -> None:
        raise NotImplementedError

    async def _open(self, engine: Engine, container: str) -> None:
        """Opens the first shells. Raises `ContainerStartError` if the container cannot run commands."""
        spec = self._spec
        self._running = RunningContainer(
            engine,
            container,
            what=f"container of {spec.name}",
            shell=self._options.shell,
            workdir=spec.workdir,
            first_process=self._first_process,
        )
        try:
            await self._running.open()
        except ContainerError as error:
            raise ContainerStartError(
                f"The container of {spec.name} started but cannot run commands. {error}"
            ) from error

    @property
    def _started(self) -> RunningContainer:
        if self._running is None:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        return self._running

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        options["env"] = {**self._network.env, **(options.get("env") or {})}
        return await self._started.exec(command, **options)

    async def upload(self, source: str | Path, target: str | Path) -> None:
        await self._started.upload(source, target)

    async def download(self, source: str | Path, target: str | Path) -> None:
        await self._started.download(source, target)

    async def open_terminal(
        self, *, columns: int, lines: int, user: User | None = None, env: Mapping[str, str] | None = None
    ) -> Terminal:
        variables = {**self._network.env, **(env or {})}
        return await self._started.open_terminal(columns=columns, lines=lines, user=user, env=variables)

    async def forward_port(self, serve: Serve, *, port: int = FORWARDED_PORT) -> ForwardedPort:
        return await self._started.forward_port(serve, port)

    async def set_network(self, policy: NetworkPolicy) -> None:
        running = self._started
        running.raise_if_closed()
        try:
            await self._network.set(policy)
        except ContainerError as error:
            await running.raise_if_dead(error)
            raise

    async def stop(self) -> None:
        self._stopped = True
        try:
            if self._running is not None:
                await self._running.close()
            if self._engine is not None:
                await self._remove(self._engine)
        finally:
            if self._first_process is not None:
                self._first_process.close()
            await self._network.close()

    async def _remove(self, engine: Engine) -> None:
        raise NotImplementedError


class DockerContainer(EngineContainer):
    """A container that is created from one image. It is a `SnapshottableContainer`."""

    def __init__(self, spec: ContainerSpec, options: DockerOptions) -> None:
        super().__init__(spec, options)
        self.container_name = unique_name(spec.name)
        self._capture: Capture | None = None

    async def _start(self, engine: Engine) -> None:
        from docker.errors import ImageNotFound

        try:
            await self._create_and_start(engine)
        except ImageNotFound:  # removed with another container (`keep_image=False`), or by a user
            await self._create_and_start(engine)
        await self._network.start(engine, self.container_name)
        await self._open(engine, self.container_name)

    async def _create_and_start(self, engine: Engine) -> None:
        spec = self._spec
        if spec.changes is not None:
            base = await find_base(engine, spec, keep=self._options.keep_image)
            image, self.image = str(base["Id"]), name_of(base, spec)
        else:
            image = self.image = await ensure_image(
                engine,
                name=spec.name,
                docker_image=spec.docker_image,
                context_dir=spec.context_dir,
                keep=self._options.keep_image,
            )
        mounts = await cancellation.in_thread(lambda: container_mounts(engine, spec, image)) if spec.mounts else []
        async with starts(engine):
            await cancellation.in_thread(lambda: watch_over_us(engine))
            await in_thread(lambda: self._create(engine, image, mounts), pool="starts")
            self._first_process = await FirstProcess.attach(engine, self.container_name)
            await in_thread(lambda: engine.api.start(self.container_name), pool="starts")
        if spec.changes is not None:
            await put_back(engine, self.container_name, spec.changes)
        self._capture = Capture(engine, self.container_name, self._options.capture)

    def _create(self, engine: Engine, image: str, mounts: list[Mount]) -> None:
        spec, options = self._spec, self._options
        host_config = engine.api.create_host_config(
            auto_remove=True,
            mounts=mounts,
            **self._network.create_options(engine),
            security_opt=["no-new-privileges:true"] if options.no_new_privileges else None,
            **limits(spec, engine.capabilities, swap_mb=options.swap_mb, pids_limit=options.pids_limit),
        )
        request = engine.api.create_container_config(
            image,
            FIRST_COMMAND,
            labels=owner_labels(),
            environment={**options.env, **spec.env},
            stdin_open=True,  # docker-py makes this OpenStdin and StdinOnce, with an attached stdin
            host_config=host_config,
        )
        create(engine, self.container_name, request)
        if problem := find_missing_glibc(spec.mounts, lambda path: exists(engine.api, self.container_name, path)):
            raise AgentInstallError(problem)

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        running = self._started
        running.raise_if_closed()
        assert self._capture is not None
        try:
            return await self._capture.run(objects)
        except SnapshotError as error:
            await running.raise_if_dead(error)
            raise

    async def _remove(self, engine: Engine) -> None:
        try:
            is_ours_to_remove = self._spec.docker_image is None and not self._options.keep_image
            image = self.image if is_ours_to_remove else None
            await in_thread(lambda: remove(engine, self.container_name, image), pool="removals")
        finally:
            if self._capture is not None:
                await self._capture.close()
