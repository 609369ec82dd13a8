"""A running container on a Docker engine: its commands, files, terminals and forwarded ports."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import logging
import posixpath
import shlex
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ares_exp.containers.archive import pack, unpack_directory, unpack_file
from ares_exp.containers.command_runner import CommandRunner
from ares_exp.containers.container import ExecOptions, ExecResult, Shell, User
from ares_exp.containers.docker.container_lifetime import ExitWatch, FirstProcess, exit_reason, out_of_reach
from ares_exp.containers.docker.engine import (
    CALL_TIMEOUT_SEC,
    STREAM_CHUNK_BYTES,
    Engine,
    EngineError,
    EngineStream,
    connection_failure,
    engine_errors,
    in_thread,
    reason,
    why_unreachable,
)
from ares_exp.containers.docker.network import namespace_obstacle
from ares_exp.containers.forwarded_port import (
    ForwardedPort,
    ForwardedPorts,
    Serve,
    listen_at_free_port,
    open_listening_port,
    open_relayed_port,
)
from ares_exp.containers.network_namespace import listen_inside
from ares_exp.containers.terminal import FIND_SHELL, TERM, Terminal
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerLostError,
    PortForwardingError,
    TransferError,
)

if TYPE_CHECKING:
    from docker import APIClient
    from requests import Response

_TERMINAL_SEC = 30.0
_HANG_UP_SEC = 10.0
_NO_INTERPRETER = ", or run as root on the engine's machine, which requires no interpreter"
_logger = logging.getLogger(__name__)

_NO_WORKDIR = "chdir to cwd"
"""Text in the engine's error message if a process cannot start in the image's working directory."""


class RunningContainer:
    """A running container. Runs commands on persistent shells and copies files, until it is closed or ends."""

    def __init__(
        self,
        engine: Engine,
        container: str,
        *,
        what: str,
        shell: Shell,
        workdir: str | None = None,
        first_process: FirstProcess | None = None,
    ) -> None:
        """Creates the object without opening a shell.

        `what` names the container in error messages, after "The ". `workdir` is the default directory of commands,
        instead of the image's directory. `first_process` helps to find out why the container ended.
        """
        self._engine = engine
        self._container = container
        self._what = what
        self._shell: Shell = shell
        self._spec_workdir = workdir
        self._first_process = first_process
        self._exit_watch = ExitWatch(engine, container, first_process) if first_process is not None else None
        self._channels: CommandRunner | None = None
        self._forwarded_ports = ForwardedPorts()
        self._has_entrypoint = True
        self._workdir = "/"
        self._start_dir: str | None = None
        self._closed = False

    async def open(self) -> None:
        """Opens the first shells. Raises `ContainerError` if that fails."""
        found = await in_thread(lambda: self._engine.api.inspect_container(self._container), abandon=True)
        config = found["Config"]
        self._has_entrypoint = bool(config.get("Entrypoint"))
        self._workdir = self._spec_workdir or config["WorkingDir"] or "/"
        self._channels = CommandRunner(
            self.open_shell,
            workdir=self._workdir,
            starts_there=self._spec_workdir is None,
            try_again=self._starts_elsewhere,
            shell=self._shell,
            default_user=config["User"] or "root",
        )
        try:
            await self._channels.open()
        except ContainerError as error:
            await self.raise_if_dead(error)
            raise

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        if self._channels is None:
            raise ContainerDiedError(f"The {self._what} has not been started.")
        try:
            return await self._channels.exec(command, **options)
        except ContainerError as error:
            await self.raise_if_dead(error)
            raise

    async def open_shell(self, user: User | None) -> EngineStream:
        """Starts a `sh` in the container as `user`, and returns its stream. `None` is the image's user."""
        engine, name, as_user = self._engine, self._container, "" if user is None else str(user)
        start_dir = self._start_dir
        self.raise_if_closed()
        try:
            created = await in_thread(
                lambda: engine.api.exec_create(name, ["sh"], stdin=True, user=as_user, workdir=start_dir),
                abandon=True,
            )
            connection = await engine.hijack(f"/exec/{created['Id']}/start", {"Detach": False, "Tty": False})
        except engine_errors() as error:
            if start_dir is None and self._starts_elsewhere(reason(error)):
                return await self.open_shell(user)
            raise ContainerError(
                f"No shell could be opened in the {self._what}"
                f"{f' as user {as_user!r}' if as_user else ''}: {reason(error)}."
            ) from error
        return EngineStream(*connection)

    async def open_terminal(self, *, columns: int, lines: int, user: User | None, env: Mapping[str, str]) -> Terminal:
        engine, name, as_user = self._engine, self._container, "" if user is None else str(user)
        self.raise_if_closed()
        try:
            created = await in_thread(
                lambda: engine.api.exec_create(
                    name,
                    ["sh", "-c", f'echo $$; {FIND_SHELL}; exec "$SHELL" -l'],
                    stdin=True,
                    tty=True,
                    user=as_user,
                    environment={**env, "TERM": TERM},
                    workdir=self._start_dir or self._workdir,
                ),
                abandon=True,
            )
            size = {"Detach": False, "Tty": True, "ConsoleSize": [lines, columns]}
            connection = await engine.hijack(f"/exec/{created['Id']}/start", size)
            try:
                await in_thread(lambda: engine.api.exec_resize(created["Id"], height=lines, width=columns))
                async with asyncio.timeout(_TERMINAL_SEC):
                    pid = int(await connection[0].readline())
            except BaseException as error:
                connection[1].close()
                if isinstance(error, TimeoutError | ValueError):
                    raise EngineError("its shell does not start") from error
                raise
        except engine_errors() as error:
            failure = ContainerError(f"No terminal could be opened in the {self._what}: {reason(error)}.")
            await self.raise_if_dead(failure)
            raise failure from error
        return DockerTerminal(*connection, hang_up=lambda: self._hang_up(pid))

    async def _hang_up(self, pid: int) -> None:
        """Ends the shell of a terminal: first with SIGHUP, which it passes on to its jobs, then with SIGKILL."""
        script = f"kill -HUP {pid}; sleep 0.1; kill -KILL {pid}"
        with contextlib.suppress(ContainerError):
            await self.exec(script, user="root", shell="sh -c", timeout_sec=_HANG_UP_SEC)

    def _starts_elsewhere(self, why: str) -> bool:
        """Returns whether an error reports a missing working directory. If so, later shells start in `/`."""
        if _NO_WORKDIR not in why:
            return False
        self._start_dir = "/"
        return True

    async def forward_port(self, serve: Serve, port: int) -> ForwardedPort:
        self.raise_if_closed()
        try:
            return await self._forwarded_ports.open(lambda: self._make_forwarded_port(serve, port))
        except engine_errors(ContainerError) as error:
            await self.raise_if_dead(error)
            if isinstance(error, PortForwardingError):
                raise
            raise PortForwardingError(f"No forwarded port can be opened in the container: {reason(error)}.") from error

    async def _make_forwarded_port(self, serve: Serve, port: int) -> ForwardedPort:
        """Opens a forwarded port with a socket in the container's network. If that is impossible, uses a relay."""
        engine, container = self._engine, self._container
        why = await in_thread(lambda: namespace_obstacle(engine.host))
        if why is None:
            found = await in_thread(lambda: engine.api.inspect_container(container), abandon=True)
            listen = functools.partial(listen_inside, found["State"]["Pid"], found["Id"])
            try:
                return await open_listening_port(lambda: listen_at_free_port(listen, port), serve)
            except OSError as error:
                why = str(error)
        _logger.info("A forwarded port of %s needs a relay process in the container: %s.", container, why)
        return await open_relayed_port(lambda: self.open_shell("0"), serve, port, remedy=_NO_INTERPRETER)

    async def upload(self, source: str | Path, target: str | Path) -> None:
        source, path = Path(source), posixpath.join(self._workdir, str(target))
        directory, name = (path, "") if source.is_dir() else posixpath.split(path)
        made = await self.exec(
            f"mkdir -p -- {shlex.quote(directory)}", user="root", cwd="/", timeout_sec=60, shell="sh -c"
        )
        if made.exit_code != 0:
            raise TransferError(f"Cannot upload {source} to {path}: {made.output.strip()}.")
        await self._transfer(lambda api: put(api, self._container, source, directory, name), f"upload to {path}")

    async def download(self, source: str | Path, target: str | Path) -> None:
        path = posixpath.join(self._workdir, str(source))
        await self._transfer(lambda api: get(api, self._container, path, Path(target)), f"download of {path}")

    async def _transfer(self, copy: Callable[[APIClient], None], what: str) -> None:
        self.raise_if_closed()
        try:
            await in_thread(lambda: copy(self._engine.api), pool="transfers")
        except engine_errors(TransferError) as error:
            await self.raise_if_dead(error)
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"The {what} failed: {reason(error)}.") from error

    def raise_if_closed(self) -> None:
        if self._closed:
            raise ContainerDiedError(f"The {self._what} has not been started, or has been stopped.")

    async def raise_if_dead(self, cause: Exception) -> None:
        """Raises an error, chained to `cause`, if the container has ended or the engine cannot be reached.

        Raises:
            ContainerLostError: The container has ended or cannot be reached, for a reason outside of the container.
            ContainerDiedError: The container has ended for another reason, or `close` was called.
        """
        self.raise_if_closed()  # if the container was stopped, report this instead of `cause`
        if self._exit_watch is not None:
            dead = await self._exit_watch.cause()
        else:
            dead = await in_thread(lambda: exit_reason(self._engine, self._container), abandon=True)
        if dead is None and (why := await why_unreachable(self._engine.host)):  # open connections may still work
            raise ContainerLostError(f"The {self._what} cannot be reached. {why}.") from cause
        # An engine that is shutting down still answers some requests.
        if dead is None and (failure := connection_failure(cause)) is not None:
            dead = out_of_reach(self._engine, f"broke the connection ({reason(failure)})")
        if dead is not None and dead.exit_code == 0 and not self._has_entrypoint and self._first_process is not None:
            dead = out_of_reach(self._engine, "closed the connection, which ended the container")  # see FIRST_COMMAND
        if dead is not None:
            seen = self._first_process.last_output() if self._first_process is not None else ""
            kind = ContainerLostError if dead.is_outside else ContainerDiedError
            raise kind(f"The {self._what} {dead.clause}.{seen}") from cause

    async def close(self) -> None:
        """Closes forwarded ports and shells. Running commands raise `ContainerDiedError`. Idempotent."""
        self._closed = True
        await self._forwarded_ports.close()
        if self._exit_watch is not None:
            self._exit_watch.close()
        if self._channels is not None:
            await self._channels.close()


class DockerTerminal:
    """A `Terminal` over a connection from `Engine.hijack`, on which the engine sends plain bytes without frames."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hang_up: Callable[[], Awaitable[None]]
    ) -> None:
        """Takes over a connection. `hang_up` must end the shell, which the engine would keep running."""
        self._reader = reader
        self._writer = writer
        self._hang_up = hang_up
        self._closed = False

    async def read(self) -> bytes:
        return await self._reader.read(STREAM_CHUNK_BYTES)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._writer.close()
            await self._hang_up()


# Bits of Go's file mode, which the engine reports.
_DIRECTORY, _SYMLINK = 1 << 31, 1 << 27
_MAX_LINKS = 10


def put(api: APIClient, container: str, source: Path, directory: str, file_name: str) -> None:
    """Copies `source` into the existing `directory` of the container. Blocking.

    `archive.pack` describes the arguments.
    """
    with pack(source, file_name) as packed:
        api.put_archive(container, directory, packed)


def get(api: APIClient, container: str, source: str, target: Path) -> None:
    """Copies the file or directory `source` from the container to `target`. Copies the target of a link, not the link.

    Blocking. Raises `TransferError` if `source` is missing, or cannot be unpacked safely.
    """
    path = source
    for _ in range(_MAX_LINKS):
        with open_archive(api, container, path) as answer:
            if answer.status_code == 404:
                raise TransferError(f"Cannot download {source}: no such file in the container.")
            if answer.status_code != 200:
                raise EngineError(answer.json().get("message", answer.reason), answer.status_code)
            stat = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
            if stat["mode"] & _DIRECTORY:
                return unpack_directory(answer.raw, target, strip_root=True)
            if not stat["mode"] & _SYMLINK:
                return unpack_file(answer.raw, target)
            path = posixpath.join(posixpath.dirname(path), stat["linkTarget"])
    raise TransferError(f"Cannot download {source}: its path has more than {_MAX_LINKS} symbolic links.")


def exists(api: APIClient, container: str, path: str) -> bool:
    """Returns whether a path exists in a container. Also works before the container's start. Blocking."""
    with open_archive(api, container, path) as answer:
        return answer.status_code != 404


def open_archive(api: APIClient, container: str, path: str) -> Response:
    """Requests a tar archive of a path. Unlike with docker-py's method, the response can be closed early. Blocking."""
    answer: Response = api.get(
        f"{api.base_url}/v{api.api_version}/containers/{container}/archive",
        params={"path": path},
        headers={"Accept-Encoding": "identity"},
        stream=True,
        timeout=CALL_TIMEOUT_SEC,
    )
    return answer
