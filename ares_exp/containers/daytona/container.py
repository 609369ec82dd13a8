"""The container of `container=daytona`: a sandbox of the Daytona service.

To copy files, one request transfers a tar archive with all of them. The `tar` of the sandbox packs or unpacks it, so
that paths in the sandbox are resolved only there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import posixpath
import re
import secrets
import shlex
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Unpack

from ares_exp.cancellation import cancel_all, finish, in_thread
from ares_exp.containers import archive
from ares_exp.containers.command_runner import END_SEC, CommandRunner
from ares_exp.containers.container import (
    ROOT_NAMES,
    Container,
    ContainerSpec,
    ExecOptions,
    ExecResult,
    User,
    bounded_start,
)
from ares_exp.containers.daytona.failures import NoObjectStoreError, plain
from ares_exp.containers.daytona.provider_snapshot import keep_files, make_ready, snapshot_to_start_from
from ares_exp.containers.daytona.sandbox_request import DaytonaOptions, create_params, network_settings, ttl_minutes
from ares_exp.containers.daytona.service import Connections, DaytonaService, create_sandbox, delete_sandbox
from ares_exp.containers.daytona.shells import SandboxShells, ShellStream
from ares_exp.containers.filesystem.delta import Delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.forwarded_port import FORWARDED_PORT, ForwardedPort, ForwardedPorts, Serve, open_relayed_port
from ares_exp.containers.images.image_plan import ImagePlan, plan_image
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.containers.ownership import owner_labels, unique_name, working_directory
from ares_exp.containers.terminal import TERM, Terminal
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerServiceError,
    ContainerServiceUnavailableError,
    SnapshotError,
    TransferError,
)

if TYPE_CHECKING:
    from daytona import AsyncDaytona

_TRANSFER_SEC = 600
_PACKED = re.compile(r"(file|directory) ([0-9]{1,15})\n")

_logger = logging.getLogger(__name__)


class DaytonaContainer(Container):
    """A container that is a sandbox of the service. It is a `SnapshottableContainer`."""

    image: str | None = None

    def __init__(self, spec: ContainerSpec, options: DaytonaOptions, connections: Connections) -> None:
        self._spec = spec
        self._options = options
        self._connections = connections
        self.sandbox_name = unique_name(spec.name)
        self._starting: asyncio.Task[None] | None = None
        self._service: DaytonaService | None = None
        self._shells: SandboxShells | None = None
        self._start_directory = "/"
        self._channels: CommandRunner | None = None
        self._user: User = "root"
        self._workdir: str | None = None
        self._image_env: Mapping[str, str] = {}
        self._policy: NetworkPolicy | None = spec.network
        self._stopping, self._capturing = asyncio.Lock(), asyncio.Lock()
        self._forwarded_ports = ForwardedPorts()
        self._terminals = ForwardedPorts()
        self._stopped = False

    async def start(self) -> None:
        what, started = f"The sandbox of {self._spec.name}", self._starting is not None or self._stopped
        limit = self._spec.start_timeout_sec
        slow = "Set `timeouts.build_multiplier=2`."
        async with bounded_start(what, limit, started=started, stop=self.stop, remedy=slow):
            starting = self._starting = asyncio.create_task(self._start())
            await asyncio.wait({starting})
            if starting.cancelled():
                raise ContainerDiedError("The container was stopped while it was starting.")
            await starting

    async def _start(self) -> None:
        spec, options = self._spec, self._options
        service = self._service = self._connections.acquire()
        ttl_min = ttl_minutes(spec, options)
        kept = snapshot_to_start_from(spec.changes)
        if kept is not None:
            await make_ready(service, kept)
        async with working_directory("build") as directory:
            plan = await in_thread(lambda: plan_image(spec, options.snapshot))
            self.image = plan.image or plan.snapshot or f"the Dockerfile of {spec.name}"
            if kept is not None:
                plan = plan.with_kept_files(kept)
            plan = await self._create(service, plan, directory, ttl_min)
        shells = self._running()
        service.keep_alive(shells.sandbox, ttl_min)
        self._start_directory = await shells.open()
        if plan.builds_after_start:
            await self._become({}, None, "root")
        else:
            await self._become({}, plan.workdir, plan.user)
        for mount in spec.mounts:
            if mount not in plan.layers:
                await self.upload(mount.source, mount.target)
        if plan.builds_after_start:
            await self._finish_image(plan)

    async def _create(self, service: DaytonaService, plan: ImagePlan, directory: Path, ttl_min: int) -> ImagePlan:
        """Creates the sandbox. Returns the plan that it used: `stored` or `after_start` of `plan`."""
        spec, options = self._spec, self._options

        async def create(plan: ImagePlan) -> ImagePlan:
            params = await in_thread(
                lambda: create_params(spec, options, plan, labels=owner_labels(), ttl_min=ttl_min, directory=directory)
            )
            sandbox = await create_sandbox(service, params, name=self.sandbox_name, timeout_sec=spec.start_timeout_sec)
            self._shells = SandboxShells(service, sandbox)
            return plan

        if service.has_object_store and plan.snapshot is None:
            stored = await in_thread(lambda: plan.stored(directory, spec.mounts))
            try:
                return await create(stored)
            except NoObjectStoreError:
                service.has_object_store = False
        return await create(plan.after_start())

    async def _finish_image(self, plan: ImagePlan) -> None:
        """Applies the lines of the Dockerfile that the service did not build, and then the task's network policy."""
        self._policy = None  # the builder's network

        async def run(
            command: str, *, env: Mapping[str, str] | None = None, cwd: str = "/", user: str = "root"
        ) -> ExecResult:
            return await self.exec(command, env=env, cwd=cwd, user=user, shell="sh -c")

        workdir = self._workdir or self._start_directory
        finished = await plan.apply(run, self.upload, workdir=workdir, restored=self._spec.changes is not None)
        await self._become(finished.env, finished.workdir, finished.user)
        await self.set_network(self._spec.network)

    async def _become(self, env: Mapping[str, str], workdir: str | None, user: User) -> None:
        """Replaces the shells by shells with these settings. `env` and `workdir` of the task's spec override them."""
        if self._channels is not None:
            await self._channels.close()
        self._image_env = {name: value for name, value in env.items() if name not in self._spec.env}
        self._workdir, self._user = self._spec.workdir or workdir, user
        self._channels = CommandRunner(
            self._open_shell, workdir=self._workdir, shell=self._options.shell, default_user=user
        )
        await self._channels.open()

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        if self._channels is None:
            raise ContainerDiedError("The container has not been started.")
        options["env"] = {**self._image_env, **(options.get("env") or {})}
        async with self._death_reported():
            result = await self._channels.exec(command, **options)
        limit_sec = options.get("timeout_sec")
        if result.timed_out and limit_sec is not None and result.duration_sec >= limit_sec + END_SEC:
            raise ContainerServiceUnavailableError(
                f"The Daytona service did not respond within the time limit of a command ({limit_sec:g} s). The state "
                "of the command is unknown."
            )
        return result

    async def _open_shell(self, user: User | None) -> ShellStream:
        return await self._running().open_shell(self._other_user(user))

    def _other_user(self, user: User | None) -> User | None:
        """Returns the user of a command (by default, the image's user), or `None` if this user is root."""
        user = self._user if user is None else user
        return None if str(user) in ROOT_NAMES else user

    async def upload(self, source: str | Path, target: str | Path) -> None:
        source, path = Path(source), self._absolute(target)
        async with self._copying(f"upload to {path}") as packed_path:
            directory, name = (path, "") if source.is_dir() else posixpath.split(path)
            into = shlex.quote(directory or "/")
            with await in_thread(lambda: archive.pack(source, name)) as packed:
                await self._send(packed, packed_path)
            unpack = f"mkdir -p -- {into} && tar -xpf {packed_path} -C {into}; e=$?; rm -f {packed_path}; exit $e"
            result = await self._run_as_root(unpack)
            if result.exit_code != 0:
                reason = plain(result.output.strip()[-1000:]) or f"exit code {result.exit_code}"
                raise TransferError(f"Cannot copy {source} to {path} in the sandbox: {reason}.")

    async def download(self, source: str | Path, target: str | Path) -> None:
        source = self._absolute(source)
        async with self._copying(f"download of {source}") as packed_path:
            path = shlex.quote(source)
            directory, name = posixpath.split(source)
            result = await self._run_as_root(
                "k= e=0; "
                f"if [ -d {path} ]; then k=directory; tar -cf {packed_path} -C {path} . 2>/dev/null || e=$?; "
                f"elif [ -e {path} ]; then k=file; "
                f"tar -chf {packed_path} -C {shlex.quote(directory)} -- {shlex.quote('./' + name)} 2>/dev/null "
                '|| e=$?; fi; [ -n "$k" ] || exit 3; [ $e -lt 2 ] || exit 4; '
                f'echo "$k $(($(wc -c <{packed_path})))"'
            )
            packed = _PACKED.fullmatch(result.output)
            try:
                if result.exit_code == 3:
                    raise TransferError(f"Cannot copy {source} out of the sandbox: the path does not exist.")
                if result.exit_code != 0 or packed is None:
                    raise TransferError(f"Cannot copy {source} out of the sandbox: `tar` cannot pack it.")
                size = int(packed[2])
                if size > archive.MAX_PACKED_BYTES:
                    raise TransferError(
                        f"Cannot copy {source} out of the sandbox: it exceeds {archive.MAX_BYTES} bytes."
                    )
                with tempfile.SpooledTemporaryFile(max_size=archive.SPOOL_BYTES) as file:
                    try:
                        await self._fetch(packed_path, file, size)
                    except TransferError as error:
                        raise TransferError(f"Cannot copy {source} out of the sandbox. {error}") from error
                    file.seek(0)
                    unpack = archive.unpack_file if packed[1] == "file" else archive.unpack_directory
                    await in_thread(lambda: unpack(file, Path(target)))
            finally:
                with contextlib.suppress(ContainerError):
                    await self._run_as_root(f"rm -f {packed_path}")

    @contextlib.asynccontextmanager
    async def _copying(self, what: str) -> AsyncIterator[str]:
        """Yields a new path in the sandbox for an archive. Replaces errors of the service by `TransferError`."""
        directory = self._running().directory
        try:
            async with self._death_reported():
                yield f"{directory}/{secrets.token_hex(6)}.tar"
        except ContainerServiceError as error:
            if error.retryable:
                raise
            raise TransferError(f"The {what} failed. {error}") from error

    async def _run_as_root(self, command: str) -> ExecResult:
        return await self.exec(command, user="root", cwd="/", shell="sh -c", timeout_sec=_TRANSFER_SEC)

    async def _send(self, file: IO[bytes], path: str) -> None:
        from daytona import FileUpload

        shells = self._running()

        async def send(_: AsyncDaytona) -> None:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            # The SDK reads a file on disk while sending it.
            source = file.read() if size <= archive.SPOOL_BYTES else f"/dev/fd/{file.fileno()}"
            await shells.sandbox.fs.upload_files([FileUpload(source=source, destination=path)], timeout=_TRANSFER_SEC)

        what = f"The upload to {path} in sandbox {self.sandbox_name}"
        await shells.service.call(what, send, timeout_sec=_TRANSFER_SEC)

    async def _fetch(self, path: str, file: IO[bytes], size: int) -> None:
        """Copies the sandbox's file `path`, which must have `size` bytes, to `file`."""
        from aiohttp import ClientError, ClientResponseError
        from daytona import DaytonaConnectionError, DaytonaError

        shells = self._running()

        async def fetch(_: AsyncDaytona) -> int:
            file.seek(0)
            file.truncate()
            try:
                pieces: Any = await shells.sandbox.fs.download_file_stream(path, timeout=_TRANSFER_SEC)
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        file.write(piece)
                        if file.tell() > size:
                            break
            except ClientResponseError as error:  # the SDK passes on errors that follow its first response
                raise DaytonaError(error.message, error.status, error.headers) from error
            except ClientError as error:
                raise DaytonaConnectionError(str(error)) from error
            return file.tell()

        what = f"The download of {path} from sandbox {self.sandbox_name}"
        received = await shells.service.call(what, fetch, timeout_sec=_TRANSFER_SEC)
        if received != size:
            raise TransferError(
                f"The size of {path} in the sandbox changed from {size} bytes during the download. A process may be "
                "changing the file, or may have replaced the programs that read it."
            )

    def _absolute(self, path: str | Path) -> str:
        """Returns the absolute path in the sandbox. `path` may be relative to the working directory of commands."""
        return posixpath.join(self._workdir or self._start_directory, str(path))

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        shells = self._running()
        # The service makes one snapshot of a sandbox at a time.
        async with self._death_reported(), self._capturing:
            return await keep_files(shells.service, shells.sandbox)

    async def forward_port(self, serve: Serve, *, port: int = FORWARDED_PORT) -> ForwardedPort:
        self._running()
        async with self._death_reported():
            return await self._forwarded_ports.open(
                lambda: open_relayed_port(
                    lambda: self._running().open_shell(None, is_told=False),
                    serve,
                    port,
                    lease_sec=self._options.forwarded_port_lease_sec,
                )
            )

    async def open_terminal(
        self, *, columns: int, lines: int, user: User | None = None, env: Mapping[str, str] | None = None
    ) -> Terminal:
        shells = self._running()
        variables = {**self._image_env, **(env or {}), "TERM": TERM}
        async with self._death_reported():
            return await self._terminals.open(
                lambda: shells.open_terminal(
                    columns=columns, lines=lines, user=self._other_user(user), workdir=self._workdir, env=variables
                )
            )

    async def set_network(self, policy: NetworkPolicy) -> None:
        if policy not in self._spec.networks:
            raise ValueError(f"Expected one of the network policies in the container's spec, got {policy}.")
        shells = self._running()
        if policy == self._policy:
            return
        settings = network_settings(policy, self._options)
        self._policy = None  # unknown if the request fails
        async with self._death_reported():
            await shells.service.call(
                f"The network of sandbox {self.sandbox_name}",
                lambda _: shells.sandbox.update_network_settings(**settings),
            )
        self._policy = policy

    def _running(self) -> SandboxShells:
        if self._shells is None or self._stopped:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        return self._shells

    @contextlib.asynccontextmanager
    async def _death_reported(self) -> AsyncIterator[None]:
        """Replaces an error of the `with` block by `ContainerDiedError` if the service reports the sandbox as gone."""
        try:
            yield
        except (SnapshotError, ContainerError) as cause:
            shells = self._running()  # if the container was stopped, reports this instead of `cause`
            has_died = isinstance(cause, ContainerDiedError)  # an unresponsive service causes the same error
            is_in_doubt = has_died or isinstance(cause, ContainerServiceError)
            if is_in_doubt and await shells.service.is_gone(shells.sandbox, must_answer=has_died):
                message = f"The sandbox {self.sandbox_name} has ended, or was removed. {cause}"
                raise ContainerDiedError(message) from cause
            raise

    async def stop(self) -> None:
        self._stopped = True
        await finish(self._stop())

    async def _stop(self) -> None:
        if self._starting is not None:
            await cancel_all(self._starting)  # it leaves no sandbox, or a sandbox that is removed here
        async with self._stopping:
            service, self._service = self._service, None
            if service is None:
                return
            try:
                if self._shells is not None:
                    self._shells.is_ending = True
                await self._forwarded_ports.close()
                if self._channels is not None:
                    await self._channels.close()
                if self._shells is not None:
                    await self._shells.close()
                    await self._terminals.close()
                    service.let_expire(self._shells.sandbox)
                    await delete_sandbox(service, self.sandbox_name)
            except ContainerError as error:
                _logger.warning(
                    "The sandbox %s could not be removed, and remains until its TTL ends: %s", self.sandbox_name, error
                )
            finally:
                await self._connections.release(service)
