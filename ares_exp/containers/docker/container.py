"""Containers of a Docker engine: the base class, and the container that is created from one image.

If the container starts from a snapshot, `find_base` finds the image of the capture, and `put_back` writes the changed
files.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

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
from ares_exp.containers.docker.capture import Capture, CaptureWay
from ares_exp.containers.docker.container_lifetime import (
    FIRST_COMMAND,
    FirstProcess,
    create,
    remove,
    starts,
    why_it_stays,
)
from ares_exp.containers.docker.engine import (
    Engine,
    connect,
    connection_failure,
    engine_errors,
    in_thread,
    limits,
    reason,
    run_program,
    why_unreachable,
)
from ares_exp.containers.docker.image import ensure_image, inspect_image
from ares_exp.containers.docker.leftovers import watch_over_us
from ares_exp.containers.docker.mounts import container_mounts
from ares_exp.containers.docker.network import ContainerNetwork, NetworkOptions
from ares_exp.containers.docker.running import RunningContainer, exists
from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges, contents, sorted_by_path
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
    RestoreError,
    SnapshotError,
    SnapshotMismatchError,
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


_REMEDY = (
    "Copy the image to this engine (`docker save` on a machine that has it, `docker load` here), or start the task "
    "again. For runs with snapshots, set container.keep_image=true and keep their images on the engine."
)
_REMOVE = ["xargs", "-0", "rm", "-rf", "--"]


async def find_base(engine: Engine, spec: ContainerSpec, *, keep: bool) -> dict[str, Any]:
    """Returns the engine's description of the base image, to which `spec.changes` must be applied.

    If the engine does not have the image, the task's image is pulled or built. Raises `SnapshotMismatchError` if that
    fails, or if its id differs from the id of the base image.
    """
    assert spec.changes is not None
    base = spec.changes.delta.base
    if not base.startswith("sha256:"):
        raise SnapshotMismatchError(
            f"The snapshot of {spec.name} contains changes to {base}, not to a Docker image (sha256:…). Restore it "
            "with the backend that captured it."
        )
    found = await in_thread(lambda: inspect_image(engine.api, base), abandon=True)
    if found is not None:
        return found
    what = f"The snapshot of {spec.name} contains changes to the image {base}, which the engine does not have"
    try:
        image = await ensure_image(
            engine, name=spec.name, docker_image=spec.docker_image, context_dir=spec.context_dir, keep=keep
        )
    except (ContainerStartError, TaskError) as error:
        raise SnapshotMismatchError(f"{what}. The task's image cannot be used instead: {error} {_REMEDY}") from error
    found = await in_thread(lambda: inspect_image(engine.api, image), abandon=True)
    if found is not None and found["Id"] == base:
        return found
    if spec.docker_image is None and not keep:
        await in_thread(lambda: why_it_stays(lambda: engine.api.remove_image(image)), pool="removals")
    other = found["Id"] if found is not None else "gone"
    raise SnapshotMismatchError(f"{what}. The task's image {image} differs: it is now {other}. {_REMEDY}")


def name_of(image: dict[str, Any], spec: ContainerSpec) -> str:
    """Returns the task's name for an image if it still refers to this image. Otherwise, returns another name or id."""
    names: list[str] = image.get("RepoTags") or [image["Id"]]
    return spec.docker_image if spec.docker_image in names else names[0]


async def put_back(engine: Engine, container: str, changes: StoredChanges) -> None:
    """Deletes and writes files in a running container of the base image, so that it has the captured files.

    Raises `RestoreError` if that fails, and `SnapshotMetadataError` if a stored object is missing or damaged.
    """
    entries = changes.delta.entries
    gone = [path for path, entry in entries.items() if entry.kind == "whiteout" or entry.opaque]
    files = {path: replace(entry, opaque=False) for path, entry in entries.items() if entry.kind != "whiteout"}
    plain = StoredChanges(Delta(changes.delta.base, files), changes.objects)
    try:
        if gone:
            await _remove(engine, container, gone)
        if files:
            await in_thread(lambda: engine.api.put_archive(container, "/", archive(plain)), pool="transfers")
    except engine_errors() as error:
        if connection_failure(error) is not None:
            raise
        raise RestoreError(f"The snapshot's files could not be restored in {container}: {reason(error)}.") from error


async def _remove(engine: Engine, container: str, paths: list[str]) -> None:
    names = b"".join(os.fsencode(f".{path}\0") for path in paths)
    output, exit_code = await run_program(engine, container, _REMOVE, names, lambda file: file.read(1000))
    if exit_code:
        raise RestoreError(
            f"Deleted files could not be removed from {container}: `{' '.join(_REMOVE)}` ended with exit code "
            f"{exit_code}. {output.decode('utf-8', 'replace').strip()}".rstrip()
        )


_TYPES = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE, "fifo": tarfile.FIFOTYPE}


def archive(changes: StoredChanges) -> Iterator[bytes]:
    """Yields a tar archive of all changes except deletions. Raises `SnapshotCorruptError` for a damaged object."""
    links: dict[int, str] = {}
    for path, entry in sorted_by_path(changes.delta.entries).items():
        member = _member(path, entry)
        if entry.link is not None and (first := links.setdefault(entry.link, member.name)) != member.name:
            member.type, member.linkname = tarfile.LNKTYPE, first
        elif entry.kind == "file":
            member.size = entry.size
        yield member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if member.size:
            yield from (
                part if isinstance(part, bytes) else bytes(part) for part in contents(changes.objects, path, entry)
            )
            yield bytes(-member.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(path: str, entry: Entry) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path[1:])
    member.type, member.linkname = _TYPES[entry.kind], entry.target
    member.mode, member.uid, member.gid = entry.mode, entry.uid, entry.gid
    member.mtime, fraction = divmod(entry.mtime_ns, 10**9)
    headers = dict[str, str]()
    if fraction:
        sign, (seconds, fraction) = "-" * (entry.mtime_ns < 0), divmod(abs(entry.mtime_ns), 10**9)
        headers["mtime"] = f"{sign}{seconds}.{fraction:09}"
    for attribute, value in sorted(entry.xattrs.items()):
        if attribute.isprintable() and "=" not in attribute:  # other names cannot be stored in an archive
            headers[f"SCHILY.xattr.{attribute}"] = value.decode("utf-8", "surrogateescape")
    member.pax_headers = headers
    return member
