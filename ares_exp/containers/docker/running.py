"""Commands and files of a container that runs on a Docker engine, whoever made it."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ares_exp.containers.container import ExecOptions, ExecResult, Shell, User
from ares_exp.containers.docker.death import DeathWatch, cause_of_death
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.life import FirstProcess
from ares_exp.containers.docker.stream import EngineStream
from ares_exp.containers.docker.transfer import get, put
from ares_exp.containers.shell_pool import ShellPool
from ares_exp.errors import ContainerDiedError, ContainerError, TransferError

if TYPE_CHECKING:
    from docker import APIClient

ROOT = ("root", "0")

_NO_WORKDIR = "chdir to cwd"
"""In the message of an engine that cannot start a process in the image's working directory."""


class RunningContainer:
    """Runs commands over persistent shells and copies files, until it is closed or the container ends."""

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
        """Talks to nobody yet.

        Args:
            engine: The engine.
            container: Its name.
            what: What messages call it; they begin with "The " and this.
            shell: What reads commands that do not say.
            workdir: Default directory of commands; `None`: the image's.
            first_process: Its first process, where that is attached.
        """
        self._engine = engine
        self._container = container
        self._what = what
        self._shell: Shell = shell
        self._spec_workdir = workdir
        self._first_process = first_process
        self._death = DeathWatch(engine, container, first_process) if first_process is not None else None
        self._channels: ShellPool | None = None
        self._default_user = ""
        self._workdir = "/"
        self._start_dir: str | None = None
        self._closed = False

    async def open(self) -> None:
        """Opens the first shells.

        Raises:
            ContainerError: No shell can be had; `ContainerDiedError` when the container is gone.
            EngineError, docker.errors.DockerException, requests.exceptions.RequestException: The engine refused, or is
                gone.
        """
        found = await in_thread(lambda: self._engine.api.inspect_container(self._container), abandon=True)
        config = found["Config"]
        self._default_user = config["User"] or "root"
        self._workdir = self._spec_workdir or config["WorkingDir"] or "/"
        root = None if self._default_user in ROOT else "root"
        self._channels = ShellPool(
            self._open_shell,
            workdir=self._workdir,
            starts_there=self._spec_workdir is None,
            try_again=self._starts_elsewhere,
            shell=self._shell,
            root=root,
        )
        try:
            await self._channels.open()
        except ContainerError as error:
            await self.raise_if_dead(error)
            raise

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """As `Container.exec`.

        Raises:
            ContainerDiedError: The container ended or no longer answers.
            ContainerError: It has no such user.
            ValueError: As `Container.exec`.
        """
        if self._channels is None:
            raise ContainerDiedError(f"The {self._what} has not been started.")
        if str(options.get("user")) == self._default_user:
            options["user"] = None  # the same shells
        try:
            return await self._channels.exec(command, **options)
        except ContainerError as error:
            await self.raise_if_dead(error)
            raise

    async def _open_shell(self, user: User | None) -> EngineStream:
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
                return await self._open_shell(user)
            raise ContainerError(
                f"No shell could be opened in the {self._what}"
                f"{f' as user {as_user!r}' if as_user else ''}: {reason(error)}."
            ) from error
        return EngineStream(*connection)

    def _starts_elsewhere(self, why: str) -> bool:
        """From now on shells start in `/`, if it is the working directory that they cannot start in: it is missing."""
        if _NO_WORKDIR not in why:
            return False
        self._start_dir = "/"
        return True

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
        await self._transfer(lambda api: put(api, self._container, source, directory, name), f"upload to {path}")

    async def download(self, source: str | Path, target: str | Path) -> None:
        """As `Container.download`.

        Raises:
            TransferError: With the path and the reason; a missing `source` included.
            ContainerDiedError: The container is gone.
        """
        path = posixpath.join(self._workdir, str(source))
        await self._transfer(lambda api: get(api, self._container, path, Path(target)), f"download of {path}")

    async def _transfer(self, copy: Callable[[APIClient], None], what: str) -> None:
        self.raise_if_closed()
        failures: tuple[type[Exception], ...] = (*engine_errors(), TransferError)
        try:
            await in_thread(lambda: copy(self._engine.api), lane="transfers")
        except failures as error:
            await self.raise_if_dead(error)
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"The {what} failed: {reason(error)}.") from error

    def raise_if_closed(self) -> None:
        """Refuses what comes after the end.

        Raises:
            ContainerDiedError: `close` was called.
        """
        if self._closed:
            raise ContainerDiedError(f"The {self._what} has not been started, or has been stopped.")

    async def raise_if_dead(self, cause: Exception) -> None:
        """Tells a dead container from a refused request, and why it died.

        Raises:
            ContainerDiedError: It is dead, or `close` was called.
        """
        self.raise_if_closed()  # one that was stopped says that
        if self._death is not None:
            dead = await self._death.cause()
        else:
            dead = await in_thread(lambda: cause_of_death(self._engine, self._container), abandon=True)
        if dead is not None:
            seen = self._first_process.epitaph() if self._first_process is not None else ""
            raise ContainerDiedError(f"The {self._what} {dead}.{seen}") from cause

    async def close(self) -> None:
        """Closes the shells; commands under way raise `ContainerDiedError`. Idempotent. The container goes on."""
        self._closed = True
        if self._death is not None:
            self._death.close()
        if self._channels is not None:
            await self._channels.close()
