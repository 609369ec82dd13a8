"""The `Container` protocol: the box a code agent works in, whatever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TypedDict, Unpack, runtime_checkable

from ares_exp.containers.network_policy import PUBLIC, NetworkPolicy
from ares_exp.filesystem.delta import Delta, StoredChanges
from ares_exp.filesystem.objects import ObjectStore

User = str | int
"""An OS user: a name, a uid, or `"uid:gid"`."""

Shell = Literal["bash -lc", "bash -c", "sh -c"]
"""What reads a command: a login shell, which reads profile files first, or a plain one. No bash in the image: `sh`."""

MAX_OUTPUT_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command did.

    Attributes:
        output: stdout and stderr merged in the order in which they were written, decoded as UTF-8 (invalid bytes
            become U+FFFD). stdout alone when they were separated. Head and tail only when `elided_bytes` is not 0.
        exit_code: Exit status, 128 + n for death by signal n; `None` when the time limit ended the command.
        duration_sec: Wall seconds, measured by the caller's clock.
        timed_out: Whether the time limit ended it. Everything that it had started is dead then.
        elided_bytes: Bytes dropped from the middle of the output, and of the separate stderr.
        stderr: stderr, where it was to be separated; else `None`.
    """

    output: str
    exit_code: int | None
    duration_sec: float
    timed_out: bool = False
    elided_bytes: int = 0
    stderr: str | None = None


class ExecOptions(TypedDict, total=False):
    """Keyword arguments of `Container.exec`, all optional.

    Attributes:
        cwd: Working directory; default `ContainerSpec.workdir`, else the image's.
        env: Variables on top of the container's.
        user: Who runs it; default the image's user.
        timeout_sec: After this many seconds the whole process tree is killed inside the box and what was printed so
            far is returned with `timed_out=True`. `None`, the default: no limit. Cancelling the caller kills as well.
        max_output_bytes: Bound on kept output, half from the head, half from the tail; default `MAX_OUTPUT_BYTES`.
        shell: What reads the command; default `"bash -lc"`, unless the backend was told otherwise. Profile files may
            reset variables that the image sets (Debian's resets `PATH`), and an agent may have edited them.
        separate_stderr: Whether stderr comes apart from stdout; costs a millisecond. Default no.
    """

    cwd: str | None
    env: Mapping[str, str] | None
    user: User | None
    timeout_sec: float | None
    max_output_bytes: int
    shell: Shell
    separate_stderr: bool


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What a task asks of its container, independent of the backend.

    Attributes:
        name: Short name for humans and labels; need not be unique.
        docker_image: A prebuilt image, or `None`.
        context_dir: The task's `environment/` directory (build context with a `Dockerfile`), or `None`.
        compose_file: A Docker Compose file whose service `main` is the container, others running beside it; or `None`.
        workdir: Default directory of commands, overriding the image's; not created.
        env: Environment variables of the container, its first process included.
        network: What may be reached from the start on.
        phase_networks: What `Container.set_network` will be asked for later; nothing else may be.
        cpus, memory_mb, storage_mb, gpus: Limits; `None` is unlimited.
        users: Who will run commands, besides the image's own user, as far as the task says. A backend that knows only
            some users refuses the others before it starts anything.
        start_timeout_sec: Bound on build + create + start, seconds.
        lifetime_sec: How long it is needed at most: start, agent and scoring together; `None`: no bound is known.
        changes: Files that the box starts with on top of its base, from `SnapshottableContainer.capture_changes`.
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

    @property
    def networks(self) -> frozenset[NetworkPolicy]:
        """Every network policy of the container's life."""
        return self.phase_networks | {self.network}


@runtime_checkable
class Container(Protocol):
    """A running box. Made by a `ContainerFactory`, started once, stopped as often as one likes.

    Backends inherit from it, for `async with`.

    Attributes:
        image: What its files come from, known when it has started: an image's name, or `"host"`; `None` before.
    """

    @property
    def image(self) -> str | None: ...  # noqa: D102

    async def start(self) -> None:
        """Builds or pulls what is needed, then creates and starts the box.

        Bounded by `ContainerSpec.start_timeout_sec`. On error and on cancellation nothing is left behind.

        Raises:
            ContainerStartError: It could not be built, created or started.
            EnvironmentStartTimeoutError: It took too long.
        """
        ...

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Runs `command` in a fresh `bash -lc` (`sh` where the image has no bash), stdin closed.

        Commands may run at the same time. A non-zero exit code is a result, not an error. A background process that
        the command leaves behind lives on; its later output is dropped.

        Args:
            command: Shell source text, any length.
            options: See `ExecOptions`.

        Raises:
            ContainerDiedError: The box ended or no longer answers.
            ValueError: `command`, `cwd` or `env` holds a NUL or a lone surrogate, or a variable's name is not an
                identifier.
        """
        ...

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Copies a host file to the path `target`, or a host directory's contents into the directory `target`.

        Missing parents are made; files in the way are overwritten, others stay; modes and symlinks are kept; the owner
        is root.

        Raises:
            TransferError: With the path and the reason.
        """
        ...

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Copies a file of the box to the host path `target`, or a directory's contents into the directory `target`.

        What comes out is untrusted: no traversal, no links that leave `target`, no devices, bounded size and count.

        Raises:
            TransferError: With the path and the reason; a missing `source` included.
        """
        ...

    async def set_network(self, policy: NetworkPolicy) -> None:
        """Lets `policy` decide from now on what the box may reach, its running processes included.

        What it no longer allows is cut off, open connections too. The box's own loopback is there under any policy.

        Args:
            policy: One of `ContainerSpec.networks`.

        Raises:
            ValueError: It is none of these.
            ContainerError: It could not be put in force; which one is in force is then unknown.
        """
        ...

    async def stop(self) -> None:
        """Kills and removes the box. Idempotent, never raises for a box that is gone already."""
        ...

    async def __aenter__(self) -> Self:
        """Starts the box."""
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops the box."""
        await self.stop()


class ServiceContainer(Protocol):
    """One service of a task's compose file."""

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """As `Container.exec`, in a `sh -c`, with the working directory, user and variables of the service's own.

        Raises:
            ContainerDiedError: The service has ended.
            ContainerError: No command can be run in it.
        """
        ...

    async def download(self, source: str | Path, target: str | Path) -> None:
        """As `Container.download`; of a service that has ended, too.

        Raises:
            TransferError: With the path and the reason; a missing `source` included.
        """
        ...

    async def stop(self) -> None:
        """Kills its processes, and leaves its files and the other services."""
        ...


@runtime_checkable
class ComposedContainer(Protocol):
    """A `Container` that is the service `main` of a compose file."""

    def service(self, name: str) -> ServiceContainer:
        """One of its services, `main` included.

        Raises:
            ContainerError: There is no such service; the message names those that are there.
        """
        ...


@runtime_checkable
class SnapshottableContainer(Protocol):
    """A `Container` whose changed files can be captured, and given to another one of its backend by the spec."""

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        """Reads what differs from the box's base (its image, or the host). The box goes on as if nothing had been.

        Only what changed since the last capture of this box is read anew.

        Args:
            objects: Where the contents of files go.

        Raises:
            CaptureError: The files could not be read; with the path and the reason.
            SnapshotUnsupportedError: This box cannot be captured here; with the reason and a remedy.
            ContainerDiedError: The box is gone.
        """
        ...


@runtime_checkable
class ContainerFactory(Protocol):
    """Makes containers of one backend. Constructing it validates its options and touches nothing.

    A backend that holds something between containers has an `async def close()` too, which a run calls at its end. One
    whose containers are `SnapshottableContainer`s has a `def check_snapshots(self) -> None`, which raises a `UserError`
    where its options or this machine do not allow snapshots; it starts nothing, and is called before `preflight`.
    """

    name: str
    """Short name of the backend (`"local"`, `"docker"`), for records and messages."""

    def __call__(self, spec: ContainerSpec) -> Container:
        """A container for `spec`, not started yet."""
        ...

    async def preflight(self) -> None:
        """Checks that the backend can run anything at all.

        Raises:
            PreflightError: With the remedy.
        """
        ...

    def check(self, spec: ContainerSpec) -> list[str]:
        """What this backend cannot do for `spec`, found out without starting anything.

        Returns:
            Warnings: limits that will not be enforced. They are shown once and recorded with the run.

        Raises:
            UnsupportedTaskError: A feature without which the task would mean something else.
            TaskError: The container definition is malformed (no Dockerfile, say).
        """
        ...
