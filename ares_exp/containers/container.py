"""The `Container` contract, what backends owe it, and the factory of a backend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol, Self, TypedDict, Unpack, runtime_checkable

from ares_exp.cancellation import finish
from ares_exp.config.parts import completed
from ares_exp.containers.filesystem.delta import Delta, StoredChanges
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.network_policy import PUBLIC, NetworkPolicy
from ares_exp.containers.ownership import Leftover
from ares_exp.errors import ConfigError, ContainerStartError, EnvironmentStartTimeoutError

User = str | int
"""An OS user: a name, a uid, or `"uid:gid"`."""

Shell = Literal["bash -c", "sh -c", "bash -lc"]
"""The shell of a command: a plain one, or a login shell, which reads profile files first. Without bash it is `sh`."""

MAX_OUTPUT_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of one command.

    Attributes:
        output: stdout and stderr merged in the order in which they were written, decoded as UTF-8 (invalid bytes
            become U+FFFD). stdout alone when they were separated. Head and tail only when `elided_bytes` is not 0.
        exit_code: Exit status, 128 + n for death by signal n; `None` when the time limit ended the command.
        duration_sec: Wall seconds, measured by the caller's clock.
        timed_out: Whether the time limit ended it. All processes that it started are dead then.
        elided_bytes: Bytes dropped from the middle of the output, and of the separate stderr.
        stderr: stderr, if it was separated; else `None`.
    """

    output: str
    exit_code: int | None
    duration_sec: float
    timed_out: bool = False
    elided_bytes: int = 0
    stderr: str | None = None


@dataclass(frozen=True, slots=True)
class TerminalOutput:
    """What a terminal printed, as it would go to a screen.

    Attributes:
        text: Text with control sequences, decoded as UTF-8; head and tail only where there was too much of it.
        is_new: Whether it is the output of a fresh terminal: the first one, or one in the place of one that ended.
    """

    text: str
    is_new: bool = False


class ExecOptions(TypedDict, total=False):
    """Keyword arguments of `Container.exec`, all optional.

    Attributes:
        cwd: Working directory; default `ContainerSpec.workdir`, else the image's.
        env: Variables on top of the container's.
        user: Who runs it; default the image's user.
        timeout_sec: After this many seconds the whole process tree is killed inside the container and the output so far
            is returned with `timed_out=True`. `None`, the default: no limit. Cancelling the caller kills as well.
        max_output_bytes: Bound on kept output, half from the head, half from the tail; default `MAX_OUTPUT_BYTES`.
        shell: The shell of the command; default `"bash -c"`, unless the backend's option says otherwise. A login shell
            reads profile files, which may reset variables of the image (Debian's reset `PATH`), and which an agent may
            have edited.
        separate_stderr: Whether stderr is returned apart from stdout; costs a millisecond. Default no.
    """

    cwd: str | None
    env: Mapping[str, str] | None
    user: User | None
    timeout_sec: float | None
    max_output_bytes: int
    shell: Shell
    separate_stderr: bool


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory of the host that a container sees, read-only.

    Attributes:
        source: The directory on the host, which does not change.
        target: Its absolute path in the container.
        digest: Digest of its contents, for backends that copy it and keep the copy.
    """

    source: Path
    target: str
    digest: str


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The container that a task needs, independent of the backend.

    Attributes:
        name: Short name for humans and labels; need not be unique.
        docker_image: A prebuilt image, or `None`.
        context_dir: The task's `environment/` directory (build context with a `Dockerfile`), or `None`.
        compose_file: A Docker Compose file whose service `main` is the container, others running beside it; or `None`.
        workdir: Default directory of commands, in place of the image's; not created.
        env: Environment variables of the container, its first process included.
        network: The network policy at the start.
        phase_networks: The policies that `Container.set_network` may be called with later.
        cpus, memory_mb, storage_mb, gpus: Limits; `None` is unlimited.
        users: Users who run commands, besides the image's user, as far as the task says. A backend with a limited set
            of users refuses the others before it starts anything.
        start_timeout_sec: Bound on build + create + start, seconds.
        lifetime_sec: Bound on the time it is needed: start, agent and scoring together; `None`: unknown.
        changes: Changed files that the container starts with, from `SnapshottableContainer.capture_changes`.
        mounts: Directories of the host that it sees. No part of its changes.
        directories: Absolute paths that the episode fills, besides those of the Dockerfile (tests and logs, say). A
            backend whose containers are not separate from the machine rejects the task if they are not empty.
    """

    name: str
    docker_image: str | None = None
    context_dir: Path | None = None
    compose_file: Path | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    network: NetworkPolicy = PUBLIC
    phase_networks: frozenset[NetworkPolicy] = frozenset()
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    users: frozenset[User] = frozenset()
    start_timeout_sec: float = 600.0
    lifetime_sec: float | None = None
    changes: StoredChanges | None = None
    mounts: tuple[Mount, ...] = ()
    directories: tuple[str, ...] = ()

    @property
    def networks(self) -> frozenset[NetworkPolicy]:
        """All network policies of the container."""
        return self.phase_networks | {self.network}


@runtime_checkable
class Container(Protocol):
    """A container that a code agent works in. Made by a `ContainerFactory`, started once, stopped any number of times.

    Backends inherit from it, for `async with`.

    Attributes:
        image: The source of its files, known once it has started: an image's name, or `"host"`; `None` before.
    """

    @property
    def image(self) -> str | None: ...

    async def start(self) -> None:
        """Builds or pulls the image, then creates and starts the container.

        Bounded by `ContainerSpec.start_timeout_sec`. After an error or a cancellation nothing remains.

        Raises:
            ContainerStartError: It could not be built, created or started.
            EnvironmentStartTimeoutError: It took too long.
        """

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Runs `command` in a fresh `bash -c` (`sh` where the image has no bash), stdin closed.

        Commands may run at the same time. A non-zero exit code is a result, not an error. A background process that the
        command leaves behind keeps running; its later output is dropped.

        Args:
            command: Shell source text, any length.
            options: See `ExecOptions`.

        Raises:
            ContainerDiedError: The container ended or no longer answers.
            ContainerError: The container has no such user.
            ValueError: `command`, `cwd` or `env` holds a NUL or a lone surrogate, or a variable's name is not an
                identifier.
        """

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Copies a host file to the path `target`, or a host directory's contents into the directory `target`.

        Missing parents are created; files in the way are overwritten, others stay; modes and symlinks are kept; the
        owner is root.

        Raises:
            TransferError: With the path and the reason.
            ContainerDiedError: The container is gone.
        """

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Copies a file of the container to the host path `target`, or a directory's contents into that directory.

        The content is untrusted: no traversal, no links that leave `target`, no devices, bounded size and count.

        Raises:
            TransferError: With the path and the reason; a missing `source` included.
            ContainerDiedError: The container is gone.
        """

    async def set_network(self, policy: NetworkPolicy) -> None:
        """Puts `policy` in force, for running processes of the container too.

        Connections that it does not allow are cut. The container's loopback works under any policy.

        Args:
            policy: One of `ContainerSpec.networks`.

        Raises:
            ValueError: It is none of these.
            ContainerError: It could not be put in force; the policy in force is then unknown.
            ContainerDiedError: The container is gone.
        """

    async def stop(self) -> None:
        """Kills and removes the container. Idempotent, never raises for a container that is already gone."""

    async def __aenter__(self) -> Self:
        """Starts the container."""
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops the container."""
        await self.stop()


class ServiceContainer(Protocol):
    """One service of a task's compose file."""

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """As `Container.exec`, in a `sh -c`, with the service's working directory, user and variables.

        Raises:
            ContainerDiedError: The service has ended.
            ContainerError: Commands cannot be run in it.
        """

    async def download(self, source: str | Path, target: str | Path) -> None:
        """As `Container.download`; also from a service that has ended.

        Raises:
            TransferError: With the path and the reason; a missing `source` included.
        """

    async def stop(self) -> None:
        """Kills its processes; its files and the other services stay."""


@runtime_checkable
class ComposedContainer(Protocol):
    """A `Container` that is the service `main` of a compose file."""

    def service(self, name: str) -> ServiceContainer:
        """Returns one of its services, `main` included.

        Raises:
            ContainerError: There is no such service; the message names the existing ones.
        """


@runtime_checkable
class SnapshottableContainer(Protocol):
    """A `Container` whose changed files can be captured, and given to another container of its backend by the spec."""

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        """Reads the differences from the container's base (its image, or the host), without disturbing the container.

        Files that have not changed since the last capture of this container are not read again.

        Args:
            objects: Where the contents of files go.

        Raises:
            CaptureError: The files could not be read; with the path and the reason.
            SnapshotUnsupportedError: This container cannot be captured here; with the reason and a remedy.
            ContainerDiedError: The container is gone.
        """


@runtime_checkable
class ContainerFactory(Protocol):
    """Makes containers of one backend. Constructing it validates its options and touches nothing.

    These members are required. The optional ones, with their defaults, are in `ContainerFactoryBase`: inherit from it,
    or define some of its members.
    """

    name: str
    """Short name of the backend (`"local"`, `"docker"`), for records and messages: that of its option."""

    def __call__(self, spec: ContainerSpec) -> Container:
        """Makes a container for `spec`, not started yet."""

    async def preflight(self) -> None:
        """Checks that the backend can run containers.

        Raises:
            PreflightError: With the remedy.
        """

    def check(self, spec: ContainerSpec) -> list[str]:
        """Checks, without starting anything, that this backend can run `spec`.

        Returns:
            Warnings: limits that will not be enforced. They are shown once and recorded with the run.

        Raises:
            UnsupportedTaskError: A feature without which the task would mean something else.
            TaskError: The container definition is malformed (no Dockerfile, say).
        """


class ContainerFactoryBase(ContainerFactory):
    """All members of a backend's factory, with defaults for those that `ContainerFactory` does not require.

    Attributes:
        harmless_options: Names of the constructor's options that a snapshot may set. A snapshot can come from anywhere:
            with any other option set, it is restored only with a factory that the user gives. Default: empty.
        has_terminals: Whether its containers are `TerminalContainer`s. Default: no.
        forwards_ports: Whether its containers are `ServingContainer`s, which installed agents need. Default: no.
        harbor_name: The backend's name in Harbor, for exported jobs. `None`, the default: the class is named instead.
    """

    harmless_options: ClassVar[frozenset[str]] = frozenset()
    has_terminals: ClassVar[bool] = False
    forwards_ports: ClassVar[bool] = False
    harbor_name: ClassVar[str | None] = None

    @property
    def options(self) -> Mapping[str, Any]:
        """The constructor's options that snapshots record, JSON-ready, without secrets. Default: empty."""
        return {}

    @property
    def is_isolated(self) -> bool:
        """Whether its containers are separate from this machine, its processes and each other. Default: yes."""
        return True

    @property
    def max_containers(self) -> int | None:
        """How many of its containers can run at the same time. Default: `None`, any number."""
        return None

    async def check_reachable(self) -> None:
        """Checks, before each start of an episode, that the engine or service answers. Default: there is none.

        Raises:
            UnreachableError: It does not answer. No episode starts while it does not.
        """

    def check_snapshots(self) -> None:
        """Checks, before `preflight`, that its containers can be captured; starts nothing. Default: they cannot be.

        Raises:
            UserError: They are not `SnapshottableContainer`s, or not with these options or on this machine.
        """
        raise ConfigError(
            f"container={self.name} cannot capture its containers' files (it has no `check_snapshots`). Set "
            "`snapshot=none`, or use container=local or container=docker."
        )

    async def close(self) -> None:
        """Releases resources held between containers, at the end of a run. Idempotent. Default: no-op."""

    @classmethod
    def find_leftovers(cls, *, images: bool = False, snapshots: bool = False) -> Iterator[Leftover]:
        """Lists the things that runs of this machine made with the backend, running runs included. Blocking.

        Default: nothing. `ares-exp clean` removes the stale ones.

        Args:
            images: Whether images that are kept for the next run count as stale, too.
            snapshots: Whether snapshots that the backend's service keeps count as stale, too.

        Raises:
            PreflightError: The backend is not available; with the remedy.
            ContainerServiceError: It is available, but cannot be listed.
        """
        yield from ()


def as_container_factory(factory: ContainerFactory) -> ContainerFactoryBase:
    """Returns `factory` with the defaults of `ContainerFactoryBase` for what it lacks."""
    return completed(factory, ContainerFactoryBase)


def refuse_second_start(*, started: bool) -> None:
    """Refuses the second start of a container.

    Args:
        started: Whether the container has been started or stopped before.

    Raises:
        ContainerStartError: `started` is true.
    """
    if started:
        raise ContainerStartError("A container can be started once; this one has been started or stopped before.")


@contextlib.asynccontextmanager
async def bounded_start(
    what: str, seconds: float, *, stop: Callable[[], Coroutine[Any, Any, None]], remedy: str = ""
) -> AsyncIterator[None]:
    """Bounds the start in its body; stops the container if the start fails, is cancelled or takes too long.

    Args:
        what: The container, as the first words of a sentence.
        seconds: Time limit.
        stop: Undoes the start, also a partial one.
        remedy: Advice to the user for a timeout; a sentence.

    Raises:
        EnvironmentStartTimeoutError: It took too long.
    """
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            yield
    except BaseException as error:
        await finish(stop())
        if timer.expired() and isinstance(error, TimeoutError):
            raise EnvironmentStartTimeoutError(
                f"{what} did not start within {seconds:g} s. {remedy}".rstrip()
            ) from error
        raise
