"""The factory and the containers of `container=local`: bubblewrap containers on the host's files.

They need no engine and no image. A container applies the task's Dockerfile when it starts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import posixpath
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Unpack

import pydantic

from ares_exp.cancellation import in_thread
from ares_exp.containers.command_runner import CommandRunner
from ares_exp.containers.container import (
    ROOT_NAMES,
    Container,
    ContainerFactoryBase,
    ContainerSpec,
    ExecOptions,
    ExecResult,
    Shell,
    User,
    bounded_start,
    find_missing_glibc,
)
from ares_exp.containers.filesystem.delta import Delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.forwarded_port import (
    FORWARDED_PORT,
    FORWARDED_PORT_HOST,
    ForwardedPort,
    ForwardedPorts,
    Serve,
    listen_at_free_port,
    open_listening_port,
)
from ares_exp.containers.images.dockerfile_steps import (
    Base,
    Dockerfile,
    apply_step,
    check_sources,
    read_dockerfile,
    stage_context,
)
from ares_exp.containers.local import guardian
from ares_exp.containers.local.cgroup import Limits, lack_of_memory, lack_of_processes, make_groups, usable_cgroup_paths
from ares_exp.containers.local.container_directory import (
    UNREADABLE,
    ContainerDirectory,
    find,
    find_storage,
    remove_stale,
)
from ares_exp.containers.local.container_files import (
    SEARCH_PATH,
    ContainerFiles,
    mount_parts,
    private_mounts,
    root_parts,
    write_layer,
)
from ares_exp.containers.local.container_process import ContainerProcess, Launch
from ares_exp.containers.local.fifo_stream import FifoStream, receive, send
from ares_exp.containers.local.isolation import (
    WAYS_OUT,
    bwrap_arguments,
    container_evidence,
    container_note,
    find_bwrap,
    find_isolation,
    is_privileged,
)
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.containers.ownership import Leftover
from ares_exp.containers.terminal import Terminal
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerStartError,
    PortForwardingError,
    PreflightError,
    SnapshotUnsupportedError,
    TaskError,
    TransferError,
    UnsupportedTaskError,
)
from ares_exp.records.results import HOST_IMAGE

if TYPE_CHECKING:
    from ares_exp.containers.local.host_factory import HostContainerFactory

TRANSFER_TIMEOUT_SEC = 600.0

BASE_ENV: Mapping[str, str] = {"PATH": SEARCH_PATH}
"""Environment variables of a container whose task has no Dockerfile."""

ONLY_ROOT = "A local container of an ordinary user supports only the user root. Run as root, or use container=docker."
_REMEDY = "Use container=docker for this task."
_NAME_SERVERS = ("--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf")


class LocalContainer(Container):
    """A bubblewrap container that sees the host's programs. It is a `SnapshottableContainer`."""

    image: str | None = None
    _backend: ClassVar[str] = "local"

    def __init__(
        self,
        spec: ContainerSpec,
        *,
        share_network: bool,
        build_network: bool = False,
        shell: Shell = "bash -c",
        pids_limit: int | None = None,
    ) -> None:
        """Creates the container object without starting a process.

        Args:
            spec: The task's container.
            share_network: Whether the container has the host's network. Otherwise, it has no network.
            build_network: Whether the Dockerfile is always applied with the host's network, as in a Docker build.
            shell: Shell of commands that do not set another shell.
            pids_limit: Maximum number of processes of the container. It is enforced only if this user may create
                cgroups.
        """
        self._spec = spec
        self._share_network = share_network
        self._build_network = build_network
        self._shell: Shell = shell
        self._limits = Limits(spec.cpus, spec.memory_mb, pids_limit)
        self._privileged = is_privileged()
        self._directory: ContainerDirectory | None = None
        self._files_in_memory = True
        self._files: ContainerFiles | None = None
        self._process: ContainerProcess | None = None
        self._user: User = "root"
        self._workdir = "/"
        self._channels: CommandRunner | None = None
        self._forwarded_ports = ForwardedPorts()
        self._stopped = False

    async def start(self) -> None:
        """Starts the container and applies the task's Dockerfile, or restores the files of `ContainerSpec.changes`.

        Raises:
            ContainerStartError: bubblewrap or an instruction of the Dockerfile failed.
            EnvironmentStartTimeoutError: The start exceeded the limit of the spec.
            TaskError: The task is not supported, for a reason listed in `LocalContainerFactory.check`.
            SnapshotError: The captured files do not match this host, or could not be written.
        """
        what, started = f"The local container of {self._spec.name}", self._directory is not None or self._stopped
        async with bounded_start(what, self._spec.start_timeout_sec, started=started, stop=self.stop):
            try:
                await self._start()
            except TimeoutError:
                raise
            except OSError as error:
                raise ContainerStartError(f"{what} did not start: {error}.") from error
            if self._stopped:
                raise ContainerStartError(f"{what} was stopped while it was starting.")
            self._channels = CommandRunner(
                self._open_shell,
                workdir=self._workdir,
                shell=self._shell,
                default_user=self._user,
            )

    async def _start(self) -> None:
        bwrap = await in_thread(find_bwrap)
        dockerfile, env = self._read_task()
        share_processes = (await in_thread(find_isolation)).isolation == "shared processes"
        storage = await in_thread(find_storage)
        self._files_in_memory = storage.in_memory
        self._directory = directory = ContainerDirectory(storage.folder)
        if share_processes:
            (directory.path / guardian.MADE).touch()
            env[guardian.MARK] = directory.path.name
        mounts = await in_thread(
            lambda: directory.prepare(lambda path: self._prepare(path, is_readable=storage.is_readable))
        )
        launch = functools.partial(self._launch, bwrap, mounts, env, share_processes=share_processes)
        context = self._spec.context_dir
        if dockerfile is None or context is None or self._spec.changes is not None:
            await launch(share_network=self._share_network)
        else:
            with_network = self._share_network or (self._build_network and storage.is_readable)
            process = await launch(share_network=with_network)
            await self._build(dockerfile, context, directory.path / "context", with_network=with_network)
            if with_network != self._share_network:  # the files remain
                await process.kill()
                await launch(share_network=self._share_network)

    def _read_task(self) -> tuple[Dockerfile | None, dict[str, str]]:
        self.image = HOST_IMAGE  # the image of FROM is ignored
        dockerfile = read_task_dockerfile(self._spec, backend=self._backend)
        if dockerfile is not None:
            self._user, self._workdir = dockerfile.user, dockerfile.workdir
        self._workdir = self._spec.workdir or self._workdir
        return dockerfile, {"HOME": "/root", **(dockerfile.env if dockerfile else BASE_ENV), **self._spec.env}

    def _prepare(self, directory: Path, *, is_readable: bool) -> list[str]:
        """Creates the container's initial files. Returns the arguments with which `bwrap` mounts them."""
        layer = directory / "layer"
        layer.mkdir()
        (directory / "channels").mkdir()
        write_layer(layer, share_network=self._share_network)
        make_groups(directory, self._limits)
        parts = [*root_parts(layer, privileged=self._privileged), *mount_parts(self._spec.mounts)]
        if is_readable:
            self._files = ContainerFiles(directory, parts, privileged=self._privileged)
            self._files.make(self._spec.changes)
            return self._files.mounts()
        if self._spec.changes is not None:
            raise SnapshotUnsupportedError(f"The files of {self._spec.name} cannot be restored. {UNREADABLE}")
        return private_mounts(parts)

    async def _launch(
        self, bwrap: Path, mounts: list[str], env: Mapping[str, str], *, share_processes: bool, share_network: bool
    ) -> ContainerProcess:
        assert self._directory is not None
        directory = self._directory.path
        arguments = bwrap_arguments(
            [*mounts, *(_NAME_SERVERS if share_network and not self._share_network else ())],
            env=env,
            channels=directory / "channels",
            share_network=share_network,
            privileged=self._privileged,
            share_processes=share_processes,
        )
        self._process = await ContainerProcess.launch(
            Launch(
                directory,
                bwrap,
                arguments,
                is_guarded=share_processes,
                files_in_memory=self._files_in_memory,
            )
        )
        return self._process

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        _, directory, files = self._running, self._directory, self._files
        assert directory is not None
        if files is None:
            raise SnapshotUnsupportedError(f"The local container of {self._spec.name} cannot be captured. {UNREADABLE}")
        try:
            return await in_thread(lambda: directory.prepare(lambda _: files.capture(objects)))
        except FileNotFoundError as error:
            raise ContainerDiedError("The container was stopped before its files could be read.") from error

    @property
    def _running(self) -> ContainerProcess:
        if self._process is None or self._stopped or not self._process.is_running:
            raise ContainerDiedError("The container has not been started, has ended, or has been stopped.")
        return self._process

    async def _build(self, dockerfile: Dockerfile, context: Path, stage: Path, *, with_network: bool) -> None:
        context = await in_thread(lambda: stage_context(context, stage))
        channels = CommandRunner(lambda user: self._open_shell(user, clean_env=True))

        async def run(
            command: str, *, env: Mapping[str, str] = BASE_ENV, cwd: str = "/", user: str = "root"
        ) -> ExecResult:
            return await channels.exec(command, env=env, cwd=cwd, user=user)

        try:
            for step in dockerfile.steps:
                await apply_step(step, context, run, self.upload)
        except ContainerStartError as error:
            remedy = "to give it the network of the host, use container.network=build."
            if self._build_network:
                remedy = (
                    "its container has no network, and the Dockerfile cannot be applied in another "
                    f"container. {UNREADABLE}"
                )
            note = "" if with_network else f" The Dockerfile was applied without a network: {remedy}"
            cause, before, output = str(error).partition(" Last lines:")  # the fix precedes the output
            raise ContainerStartError(f"{cause}{note}{before}{output}") from error
        finally:
            await channels.close()
            await in_thread(lambda: shutil.rmtree(stage, ignore_errors=True))

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        if self._channels is None:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        try:
            if not self._stopped:
                _ = self._running  # its shells may outlive its first process for a moment
            result = await self._channels.exec(command, **options)
            if result.timed_out and self._process is not None:
                await self._process.reaped()
            return result
        except ContainerError as error:
            if explained := await self._explained(error):
                raise explained from error
            raise

    async def _open_shell(self, user: User | None, *, clean_env: bool = False) -> FifoStream:
        if self._process is None or self._stopped:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        return await self._process.open_shell(self._known_user(user), clean_env=clean_env)

    def _known_user(self, user: User | None) -> User:
        user = self._user if user is None else user
        if not self._privileged and str(user) not in ROOT_NAMES:
            raise ContainerError(f"Expected root as the user of a command, got {user!r}. {ONLY_ROOT}")
        return user

    async def _explained(self, error: ContainerError) -> ContainerError | None:
        """Returns an error with the real cause, such as a lack of memory or processes; `None` if there is none."""
        if self._process is None or self._directory is None or self._stopped:
            return None
        name, directory = self._spec.name, self._directory.path
        if await self._process.has_ended():
            return ContainerDiedError(f"The local container of {name} has ended: {self._process.why_ended()}.")
        lack = lack_of_processes(directory) or lack_of_memory(directory, holds_files=self._files_in_memory)
        return type(error)(f"{error} Possible reason: in the local container of {name}, {lack}.") if lack else None

    async def upload(self, source: str | Path, target: str | Path) -> None:
        path = self._absolute(target)
        await self._transfer(lambda stream: send(stream, Path(source), path), f"upload of {source} to {path}")

    async def download(self, source: str | Path, target: str | Path) -> None:
        path = self._absolute(source)
        await self._transfer(lambda stream: receive(stream, path, Path(target)), f"download of {path} to {target}")

    async def _transfer(self, copy: Callable[[FifoStream], Awaitable[None]], what: str) -> None:
        stream = await self._open_shell("root", clean_env=True)
        try:
            async with asyncio.timeout(TRANSFER_TIMEOUT_SEC):
                await copy(stream)
        except (OSError, TransferError) as error:
            broken = f"The {what} was interrupted: {error or f'it took more than {TRANSFER_TIMEOUT_SEC:.0f} s'}."
            failure = error if isinstance(error, TransferError) else TransferError(broken)
            raise await self._explained(failure) or failure from error
        finally:
            stream.close()

    async def open_terminal(
        self, *, columns: int, lines: int, user: User | None = None, env: Mapping[str, str] | None = None
    ) -> Terminal:
        process, user = self._running, self._known_user(user)
        try:
            return await process.open_terminal(user, columns=columns, lines=lines, env=env or {}, workdir=self._workdir)
        except ContainerError as error:
            raise await self._explained(error) or error from error

    async def forward_port(self, serve: Serve, *, port: int = FORWARDED_PORT) -> ForwardedPort:
        """Opens a forwarded port. If the container shares the host's network, a random port replaces `port`."""
        process = self._running

        def listen() -> socket.socket:
            if self._share_network:  # fixed ports would collide with other containers
                return socket.create_server((FORWARDED_PORT_HOST, 0))
            return listen_at_free_port(process.listen, port)

        try:
            return await self._forwarded_ports.open(lambda: open_listening_port(listen, serve))
        except OSError as error:
            failure = PortForwardingError(f"No socket can be created in the container's network: {error}.")
            raise await self._explained(failure) or failure from error

    async def set_network(self, policy: NetworkPolicy) -> None:
        """Only checks that `policy` is allowed, because a local container has the same network in all phases."""
        if policy not in self._spec.networks:
            raise ValueError(f"Expected one of the network policies in the container's spec, got {policy}.")

    def _absolute(self, path: str | Path) -> str:
        return posixpath.join("/", self._workdir, str(path))

    async def stop(self) -> None:
        self._stopped = True
        try:
            await self._forwarded_ports.close()
            if self._channels is not None:
                await self._channels.close()
        finally:
            try:
                if self._process is not None:
                    await self._process.kill()
            finally:
                if self._directory is not None:
                    await in_thread(self._directory.remove)


def read_task_dockerfile(spec: ContainerSpec, *, backend: str = "local") -> Dockerfile | None:
    """Reads the task's Dockerfile and checks that the files it copies exist. Returns `None` if the task has none.

    Raises `UnsupportedTaskError` if the task needs something that the backend lacks, and `TaskError` if the Dockerfile
    is missing or malformed.
    """
    if spec.gpus:
        raise UnsupportedTaskError(
            f"{spec.name}: container={backend} has no GPUs, but the task needs {spec.gpus}. Leave this task out."
        )
    if problem := find_missing_glibc(spec.mounts, lambda path: Path(path).exists()):
        raise UnsupportedTaskError(f"{spec.name}: container={backend} uses the files of this machine. {problem}")
    if spec.compose_file is not None:
        raise UnsupportedTaskError(
            f"{spec.compose_file}: container={backend} does not support compose files. {_REMEDY}"
        )
    context = spec.context_dir
    if context is not None and (context / "Dockerfile").is_file():
        refusal = f"container={backend} applies a Dockerfile to the host's root and does not support {{}}. {_REMEDY}"
        dockerfile = read_dockerfile(context / "Dockerfile", Base(BASE_ENV), refusal=refusal)
        if backend == "local" and dockerfile.user not in ROOT_NAMES and not is_privileged():
            raise UnsupportedTaskError(f"{context / 'Dockerfile'}: USER {dockerfile.user}. {ONLY_ROOT}")
        check_sources(dockerfile, context)
        return dockerfile
    if spec.docker_image is not None:
        raise UnsupportedTaskError(
            f"{spec.name}: container={backend} does not support images ({spec.docker_image}). {_REMEDY}"
        )
    if context is not None:
        raise TaskError(f"{spec.name}: there is no Dockerfile in {context}.")
    return None


_PROBE = ContainerSpec(name="probe", network=NO_NETWORK, start_timeout_sec=30.0)

_logger = logging.getLogger(__name__)


class LocalContainerFactory(ContainerFactoryBase):
    """Creates bubblewrap containers, which start in milliseconds."""

    name = "local"
    has_terminals = True
    forwards_ports = True
    harmless_options = frozenset({"pids_limit", "shell"})

    @pydantic.validate_call
    def __init__(
        self,
        *,
        network: Literal["no-network", "build", "public"] = "no-network",
        shell: Shell = "bash -c",
        pids_limit: Annotated[int, pydantic.Field(ge=16)] = 4096,
    ) -> None:
        """Validates the options.

        Args:
            network: `no-network`: no network, whatever the task sets. `build`: the host's network only while a task's
                Dockerfile is applied, but no network for agents and tests. `public`: the host's network for the
                Dockerfile, and also for agents and tests if the task has a public network. The host's network includes
                services on its loopback and abstract sockets. `public` rejects tasks with `allowed_hosts`, or with
                different networks in their phases.
            shell: Shell of commands. `bash -c` and `sh -c` keep the environment variables of the task's Dockerfile.
                `bash -lc` first reads `/etc/profile`, which resets `PATH` on Debian.
            pids_limit: Maximum number of processes in one container, as a protection against fork bombs. Like a task's
                cpus and memory_mb, it is enforced only if this user may create cgroups.
        """
        self._network = network
        self._shell: Shell = shell
        self._pids_limit = pids_limit

    @property
    def _host(self) -> HostContainerFactory | None:
        """The factory of `container=host`, used if we are root in a container without namespaces; otherwise `None`."""
        if find_isolation().isolation != "none" or container_evidence() is None or os.geteuid() != 0:
            return None
        from ares_exp.containers.local.host_factory import HostContainerFactory

        return HostContainerFactory(shell=self._shell)

    @property
    def is_isolated(self) -> bool:
        """Whether this machine allows all namespaces, so that containers are fully isolated."""
        return find_isolation().isolation == "namespaces"

    @property
    def max_containers(self) -> int | None:
        """1 if commands run directly on this machine, otherwise `None` (no limit)."""
        return self._host.max_containers if self._host is not None else None

    def __call__(self, spec: ContainerSpec) -> LocalContainer:
        if self._host is not None:
            return self._host(spec)
        return LocalContainer(
            spec,
            share_network=self._network == "public" and spec.networks == {PUBLIC},
            build_network=self._network != "no-network",
            shell=self._shell,
            pids_limit=self._pids_limit,
        )

    @property
    def options(self) -> dict[str, Any]:
        return {"network": self._network, "shell": self._shell, "pids_limit": self._pids_limit}

    async def preflight(self) -> None:
        """Starts and stops an empty container as a test (about 20 ms), and removes leftovers of killed runs.

        Logs how containers are isolated on this machine, as a warning if some isolation is missing.

        Raises:
            PreflightError: bubblewrap is missing, or the kernel does not allow it. The message suggests fixes.
        """
        machine = await asyncio.to_thread(find_isolation)
        if self._host is not None:
            _logger.warning(
                "container=local runs commands directly on this machine, without isolation, as container=host does: "
                "this machine is itself a container (%s) and does not allow namespaces (%s)",
                container_evidence(),
                machine.problem,
            )
            return await self._host.preflight()
        await asyncio.to_thread(find_bwrap)
        if machine.isolation == "shared processes":
            _logger.warning(
                "container=local uses namespaces without a private /proc: containers see the processes of this "
                "machine.%s",
                container_note(),
            )
        elif machine.isolation == "namespaces":
            _logger.info("container=local uses namespaces")
        await asyncio.to_thread(remove_stale)
        try:
            async with self(_PROBE) as container:
                await container.exec("true", timeout_sec=30.0)
        except ContainerError as error:
            what = f"container=local cannot start a container on this machine: {error}{container_note()}"
            if container_evidence() and os.geteuid() != 0:
                raise PreflightError(
                    f"{what} Without namespaces, commands run in the paths of the machine itself, such as /app, "
                    f"which only root can create. {WAYS_OUT}"
                ) from error
            raise PreflightError(
                f"{what} Run as root, or allow ordinary users to create user namespaces (Ubuntu 24.04: the "
                "distribution's bubblewrap 0.11 or newer, or an AppArmor profile for bwrap), or use container=docker. "
                "As root, you can also use container=host, which has no isolation."
            ) from error

    def check_snapshots(self) -> None:
        """Raises `ConfigError` if commands run directly on this machine, whose files cannot be captured."""
        if self._host is not None:
            self._host.check_snapshots()

    @classmethod
    def find_leftovers(cls, *, images: bool = False, snapshots: bool = False) -> Iterator[Leftover]:
        if sys.platform == "linux":
            yield from find()

    def check(self, spec: ContainerSpec) -> list[str]:
        """Checks that a local container can run `spec`. Returns warnings about ignored limits and unreachable hosts.

        Raises:
            UnsupportedTaskError: The task needs an image, a compose file, GPUs, an unsupported Dockerfile instruction,
                users other than root (if this process is not privileged), or networks that differ between phases.
            TaskError: The Dockerfile is missing or malformed.
        """
        if self._host is not None:
            return self._host.check(spec)
        if self._network == "public" and spec.networks not in ({PUBLIC}, {NO_NETWORK}):
            raise UnsupportedTaskError(
                f"{spec.name}: container=local supports neither allowlists nor different networks per phase. Use "
                "container=docker, or run the task without a network: container.network=build "
                "(network access only while images are built) or container.network=no-network."
            )
        if not is_privileged() and (users := {str(user) for user in spec.users}.difference(ROOT_NAMES)):
            raise UnsupportedTaskError(
                f"{spec.name}: the task runs commands as {', '.join(sorted(users))}. {ONLY_ROOT}"
            )
        read_task_dockerfile(spec)
        warnings = [f"{limit}: not enforced by container=local ({why})" for limit, why in _not_enforced(spec)]
        if any(policy.allowed_hosts for policy in spec.networks):
            warnings.append(
                f"{spec.name}: container=local runs the task without a network, so it cannot reach its allowed_hosts"
            )
        return warnings


def _not_enforced(spec: ContainerSpec) -> Iterator[tuple[str, str]]:
    enforced = usable_cgroup_paths()
    no_groups = "this user may not create cgroups, but root usually may"
    if spec.cpus and "cpu" not in enforced:
        yield f"cpus={spec.cpus:g}", no_groups
    if spec.memory_mb and "memory" not in enforced:
        yield f"memory_mb={spec.memory_mb}", no_groups
    if spec.storage_mb:
        storage = find_storage()
        bounded = storage.in_memory and spec.memory_mb and "memory" in enforced
        bound = f"bounded by memory_mb={spec.memory_mb}" if bounded else "not bounded"
        where = "memory" if storage.in_memory else str(storage.folder)
        yield f"storage_mb={spec.storage_mb}", f"the container's files are in {where}, {bound}"
