"""Interfaces of containers and of container factories. Each backend implements them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
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

ROOT_NAMES = ("root", "0", "0:0", "root:root")

Shell = Literal["bash -c", "sh -c", "bash -lc"]
"""The shell that runs a command: a plain shell (`-c`), or a login shell (`-lc`), which first reads profile files.

If the container has no bash, commands use `sh` by default.
"""

MAX_OUTPUT_BYTES = 1024 * 1024

GLIBC_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of one command.

    Attributes:
        output: stdout and stderr merged in the order in which they were written, decoded as UTF-8 (invalid bytes become
            U+FFFD). Contains only stdout if stderr is separate, and only the head and tail if `elided_bytes` is not 0.
        exit_code: Exit status, 128 + n for death by signal n; `None` when the time limit ended the command.
        duration_sec: Wall-clock seconds, measured in this process.
        timed_out: Whether the time limit ended the command. In this case, all of its processes are dead.
        elided_bytes: Total number of bytes that were dropped from the middle of `output` and of `stderr`.
        stderr: The separate stderr, or `None` if it is merged into `output`.
    """

    output: str
    exit_code: int | None
    duration_sec: float
    timed_out: bool = False
    elided_bytes: int = 0
    stderr: str | None = None


@dataclass(frozen=True, slots=True)
class TerminalOutput:
    """Output of a terminal since the previous read, including control sequences.

    Attributes:
        text: Output decoded as UTF-8. Long output is cut in the middle, so that only its start and end remain.
        is_new: Whether the output comes from a new terminal: the first terminal, or a replacement for one that ended.
    """

    text: str
    is_new: bool = False


class ExecOptions(TypedDict, total=False):
    """Keyword arguments of `Container.exec`, all optional.

    Attributes:
        cwd: Working directory. Default: `ContainerSpec.workdir`, or the working directory of the image.
        env: Additional environment variables. They override variables of the container with the same name.
        user: User who runs the command. Default: the image's user.
        timeout_sec: Time limit. When it expires, the whole process tree is killed inside the container and the output
            so far is returned with `timed_out=True`. Cancelling the call also kills the process tree. Default: `None`,
            no limit.
        max_output_bytes: Maximum size of the returned output. Half of it is from the head of the output, half from the
            tail. Default: `MAX_OUTPUT_BYTES`.
        shell: Shell of the command. Default: `"bash -c"`, unless the backend's option sets another shell. A login shell
            reads profile files. They may reset variables of the image (Debian's files reset `PATH`), and an agent may
            have edited them.
        separate_stderr: Whether stderr is returned separately from stdout. The command then takes one more millisecond.
            Default: no.
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
    """A directory on the host that is visible in a container, read-only.

    Attributes:
        source: Directory on the host. Its contents must not change while the container exists.
        target: Absolute path of the directory in the container.
        digest: Digest of the directory's contents, by which some backends find a copy that they already have.
        needs_glibc: Name of the directory's package for error messages if its programs need glibc, otherwise empty.
    """

    source: Path
    target: str
    digest: str
    needs_glibc: str = ""


def find_missing_glibc(mounts: Iterable[Mount], exists: Callable[[str], bool]) -> str:
    """Returns an error message if a mounted package needs glibc and the container has none, otherwise `""`.

    Backends that can read files of a container before its start call this function, so that the start fails with a
    clear message. `exists` returns whether an absolute path exists in the container.
    """
    packages = [mount.needs_glibc for mount in mounts if mount.needs_glibc]
    if not packages or any(map(exists, GLIBC_LOADERS)):
        return ""
    return (
        f"This container has no glibc ({GLIBC_LOADERS[0]}), and the package {packages[0]} needs glibc. Choose an image "
        "with glibc, or another agent."
    )


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The container that a task needs, independent of any backend.

    Attributes:
        name: Short name for humans and labels; need not be unique.
        docker_image: A prebuilt image, or `None`.
        context_dir: The task's `environment/` directory (build context with a `Dockerfile`), or `None`.
        compose_file: Docker Compose file whose service `main` is the container, or `None`.
        workdir: Default directory of commands, instead of the image's working directory. The directory must exist.
        env: Environment variables of the container, including its first process.
        network: The network policy at the start.
        phase_networks: The policies of later phases, which may be passed to `Container.set_network`.
        cpus, memory_mb, storage_mb: Limits on processors, memory and storage; `None` is unlimited.
        gpus: Number of required GPUs; `None` or 0 if the task needs none.
        users: Users who run commands in addition to the image's user, as declared by the task. A backend with a limited
            set of users rejects other users before it starts anything.
        start_timeout_sec: Time limit in seconds for building, creating and starting the container together.
        lifetime_sec: Maximum time in seconds for which the container is needed (start, agent and scoring), or `None` if
            unknown.
        changes: Changed files that the container starts with, from `SnapshottableContainer.capture_changes`.
        mounts: Read-only host directories that are visible in the container. They are not part of captured changes.
        directories: Absolute paths of directories that the episode writes to, such as its tests and logs, in addition
            to the directories that the Dockerfile creates. A backend without isolation from the machine rejects the
            task if one of these directories exists and is not empty.
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
        """All network policies of the container: the policy at the start and the policies of later phases."""
        return self.phase_networks | {self.network}


@runtime_checkable
class Container(Protocol):
    """A container that a code agent works in. Backends inherit from this class, which supports `async with`.

    A `ContainerFactory` creates it. It can be started only once. `stop` may be called any number of times.

    Attributes:
        image: Source of the container's files: the name of an image, or `"host"`. `None` before the start.
    """

    @property
    def image(self) -> str | None: ...

    async def start(self) -> None:
        """Builds or pulls the image, then creates and starts the container.

        The time limit is `ContainerSpec.start_timeout_sec`. After an error or a cancellation, all resources are
        released.

        Raises:
            ContainerStartError: The container could not be built, created or started.
            EnvironmentStartTimeoutError: The start exceeded `ContainerSpec.start_timeout_sec`.
        """

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Runs shell source text in a new `bash -c` (`sh -c` if the image has no bash), with an empty stdin.

        Commands may run at the same time. A non-zero exit code is a result, not an error. Background processes keep
        running after the command ends. Their later output is dropped. `ExecOptions` describes the options.

        Raises:
            ContainerDiedError: The container has ended or no longer responds.
            ContainerError: The container has no such user.
            ValueError: `command`, `cwd` or `env` contains a NUL or a lone surrogate, or a variable's name is not an
                identifier.
        """

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Copies a host file to the path `target`, or a host directory's contents into the directory `target`.

        Missing parents are created. Existing files with the same names are overwritten, other files remain. Modes and
        symlinks are preserved. The owner is root. An existing directory `target` keeps its owner and mode.

        Raises:
            TransferError: The copy failed. The message contains the path and the reason.
            ContainerDiedError: The container is gone.
        """

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Copies a file from the container to the host path `target`, or a directory's contents into `target`.

        The content is untrusted: path traversal, links that leave `target` and devices are rejected, and the size and
        the number of entries are bounded.

        Raises:
            TransferError: The copy failed, for example because `source` is missing. The message contains the path and
                the reason.
            ContainerDiedError: The container is gone.
        """

    async def set_network(self, policy: NetworkPolicy) -> None:
        """Applies `policy`, also to running processes of the container.

        Connections that the policy does not allow are cut. The container's loopback works under any policy.

        Raises:
            ValueError: `policy` is not one of `ContainerSpec.networks`.
            ContainerError: The policy could not be applied. It is then unknown which policy applies.
            ContainerDiedError: The container is gone.
        """

    async def stop(self) -> None:
        """Kills and removes the container. Idempotent, never raises for a container that is already gone."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


class ServiceContainer(Protocol):
    """One service of a task's compose file."""

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Runs a command with `sh -c`, with the service's working directory, user and environment variables.

        See `Container.exec`. Raises `ContainerDiedError` if the service has ended, and `ContainerError` if it cannot
        run commands.
        """

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Copies a file or directory from the service to the host, even after the service has ended.

        See `Container.download`. Raises `TransferError` with the path and the reason if the copy fails.
        """

    async def stop(self) -> None:
        """Kills the service's processes. Its files and the other services remain."""


@runtime_checkable
class ComposedContainer(Protocol):
    """A `Container` of a task with a compose file: it is the service `main`, and gives access to the other services."""

    def service(self, name: str) -> ServiceContainer:
        """Returns a service of the compose file, which may also be `main`.

        Raises `ContainerError` with the names of the existing services if the compose file has no such service.
        """


@runtime_checkable
class SnapshottableContainer(Protocol):
    """A `Container` whose changed files can be captured. `ContainerSpec.changes` passes them to a new container."""

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        """Finds the files that differ from the image or the host's files, and stores their contents in `objects`.

        The container keeps running. A later capture of the same container reads only files that have changed since the
        previous capture.

        Raises:
            CaptureError: The files could not be read. The message contains the path and the reason.
            SnapshotUnsupportedError: This container cannot be captured. The message has the reason and a suggested fix.
            ContainerDiedError: The container is gone.
        """


@runtime_checkable
class ContainerFactory(Protocol):
    """Creates containers of one backend. The constructor validates the options and has no side effects.

    A custom backend must define all members of this class. Members that `ContainerFactoryBase` adds are optional:
    without them, the backend uses their defaults. A custom backend may also inherit from `ContainerFactoryBase`.
    """

    name: str
    """Short name of the backend in records, messages and options, for example `"docker"` as in `container=docker`."""

    def __call__(self, spec: ContainerSpec) -> Container:
        """Creates a container for `spec` without starting it."""

    async def preflight(self) -> None:
        """Checks that the backend can run containers. Raises `PreflightError` with a suggested fix if it cannot."""

    def check(self, spec: ContainerSpec) -> list[str]:
        """Checks, without starting anything, that this backend can run `spec`.

        Returns:
            Warnings about limits that the backend will not enforce. They are shown once and recorded with the run.

        Raises:
            UnsupportedTaskError: The task needs a feature that the backend lacks.
            TaskError: The container definition is malformed (for example, its Dockerfile is missing).
        """


class ContainerFactoryBase(ContainerFactory):
    """A base class for factories, with defaults for the optional members that `ContainerFactory` does not require.

    Attributes:
        harmless_options: Names of the constructor's options that a restored snapshot may set, even if it comes from an
            untrusted source. If it sets other options, the user has to pass the container factory. Default: empty.
        has_terminals: Whether the containers are `TerminalContainer`s. Default: no.
        forwards_ports: Whether the containers are `ServingContainer`s, which installed agents need. Default: no.
        harbor_name: Name of the same backend in the Harbor framework, for exported jobs. If it is `None` (the default),
            exported jobs contain the name of the factory's class.
    """

    harmless_options: ClassVar[frozenset[str]] = frozenset()
    has_terminals: ClassVar[bool] = False
    forwards_ports: ClassVar[bool] = False
    harbor_name: ClassVar[str | None] = None

    @property
    def options(self) -> Mapping[str, Any]:
        """The constructor's options that snapshots record, as JSON values without secrets. Default: empty."""
        return {}

    @property
    def is_isolated(self) -> bool:
        """Whether the containers are isolated from this machine, its processes and each other. Default: yes."""
        return True

    @property
    def max_containers(self) -> int | None:
        """Maximum number of containers that may run at the same time. Default: `None`, no limit."""
        return None

    async def check_reachable(self) -> None:
        """Checks, before each start of an episode, that the engine or service responds. Default: no check.

        Raises `UnreachableError` if it does not respond. In this case, no episode starts until it responds.
        """

    def check_snapshots(self) -> None:
        """Checks, without starting anything, that containers can be captured. Default: raises an error.

        Runs call this method before `preflight`. Raises `UserError` if the backend, its options or this machine do not
        support captures.
        """
        raise ConfigError(
            f"container={self.name} cannot capture its containers' files (it has no `check_snapshots`). Set "
            "`snapshot=none`, or use container=local or container=docker."
        )

    async def close(self) -> None:
        """Releases what the factory still holds at the end of a run. Idempotent. Default: no-op."""

    @classmethod
    def find_leftovers(cls, *, images: bool = False, snapshots: bool = False) -> Iterator[Leftover]:
        """Lists this backend's resources from active and ended runs on this machine. Blocking.

        `ares-exp clean` removes the stale resources. Default: lists nothing.

        Args:
            images: Whether images that are kept for later runs also count as stale, so that `clean` removes them.
            snapshots: Whether snapshots that the backend's service stores also count as stale.

        Raises:
            PreflightError: The backend is not available. The message suggests a fix.
            ContainerServiceError: The backend is available, but its resources cannot be listed.
        """
        yield from ()


def as_container_factory(factory: ContainerFactory) -> ContainerFactoryBase:
    """Returns `factory`. If it lacks optional members, adds the defaults of `ContainerFactoryBase`."""
    return completed(factory, ContainerFactoryBase)


@contextlib.asynccontextmanager
async def bounded_start(
    what: str, seconds: float, *, stop: Callable[[], Coroutine[Any, Any, None]], started: bool = False, remedy: str = ""
) -> AsyncIterator[None]:
    """Limits the time of a container's start in the `with` block. Calls `stop` if the start fails or is cancelled.

    Args:
        what: Name of the container, as the first words of a sentence.
        seconds: Time limit.
        started: Whether the container has already been started or stopped. If true, `ContainerStartError` is raised.
        stop: Function that removes everything that the start has created so far.
        remedy: Advice to the user, as a sentence that `EnvironmentStartTimeoutError` appends to its message.
    """
    if started:
        raise ContainerStartError(
            "A container can be started only once, but this container was already started or stopped. Create a new one."
        )
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
