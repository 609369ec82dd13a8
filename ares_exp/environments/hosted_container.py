"""The container object that a code agent gets, which executes, times and records the calls of the agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from ares_exp.agents.runtime.agent_runtime import AgentRuntime
from ares_exp.agents.runtime.encoding import HostFiles, digest_of
from ares_exp.containers.activity import Activity, CommandRecord
from ares_exp.containers.container import Container, ExecOptions, ExecResult, Shell, TerminalOutput, User
from ares_exp.containers.forwarded_port import FORWARDED_PORT, ForwardedPort, Serve, ServingContainer
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    DivergenceError,
    EpisodeStateError,
    PortForwardingError,
)

if TYPE_CHECKING:
    from ares_exp.containers.terminal import TerminalSession


class HostedContainer:
    """The container as an agent sees it, with the methods of `AgentContainer`.

    An agent that is not deterministic can also forward ports, as with a `ServingContainer`.

    Attributes:
        died: Error of a call that failed because the container had died; `None` if no call has failed in this way.
    """

    def __init__(
        self,
        container: Container,
        runtime: AgentRuntime,
        *,
        user: User | None,
        shell: Shell | None,
        env: Mapping[str, str],
        limit_commands: bool,
        activity: Activity,
    ) -> None:
        self.died: ContainerDiedError | None = None
        self._container = container
        self._runtime = runtime
        self._user = user
        self._shell = shell
        self._env = dict(env)
        self._limit_commands = limit_commands
        self._activity = activity
        self._terminal: TerminalSession | None = None

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Runs a command; see `AgentContainer.exec`."""
        # The journal keeps the options, so they are copied in case the agent changes them later.
        given = {name: dict(value) if isinstance(value, Mapping) else value for name, value in options.items()}
        result: ExecResult = await self._runtime.call(
            "exec", {"command": command, **given}, lambda: self._exec(command, cast("ExecOptions", given))
        )
        return result

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Uploads files; see `AgentContainer.upload`. A replay uploads nothing, and fails if the files have changed."""

        def compare(recorded: str | None) -> None:
            if digest_of(Path(source)) != recorded:
                raise DivergenceError(f"The replayed agent uploads {source}, which has changed since the recording.")

        await self._runtime.call("upload", {"target": str(target)}, lambda: self._upload(source, target), compare)

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Downloads files; see `AgentContainer.download`. For a replayed agent, writes the recorded files instead."""
        await self._runtime.call(
            "download",
            {"source": str(source)},
            lambda: self._download(source, target),
            lambda recorded: recorded.write(Path(target)),
        )

    async def use_terminal(self, keys: str, *, seconds: float, columns: int, lines: int) -> TerminalOutput:
        """Sends keys to the terminal; see `AgentTerminal.use_terminal`."""
        output: TerminalOutput = await self._runtime.call(
            "terminal",
            {"keys": keys, "seconds": seconds, "columns": columns, "lines": lines},
            lambda: self._use_terminal(keys, seconds, columns, lines),
        )
        return output

    async def close_terminal(self) -> None:
        """Closes the terminal, if it is open, and sends SIGHUP to its processes. Idempotent."""
        terminal, self._terminal = self._terminal, None
        if terminal is not None:
            await terminal.close()

    async def _use_terminal(self, keys: str, seconds: float, columns: int, lines: int) -> TerminalOutput:
        from ares_exp.containers.terminal import TerminalContainer, TerminalSession

        is_new = self._terminal is None or self._terminal.has_ended
        with self._activity.timed():
            if is_new:  # at the agent's first call, after the shell has ended, or in a restored episode
                await self.close_terminal()
                if not isinstance(self._container, TerminalContainer):
                    raise ContainerError(
                        f"A {type(self._container).__name__} cannot open a terminal. Use container=local, "
                        "container=docker or container=daytona, or choose an agent that does not need a terminal."
                    )
                with self._noting_death():
                    opening = self._container.open_terminal(
                        columns=columns, lines=lines, user=self._user, env=self._env
                    )
                    self._terminal = TerminalSession(await opening)
                await self._terminal.wait_for_prompt()
            assert self._terminal is not None
            return TerminalOutput(await self._terminal.type_keys(keys, seconds), is_new)

    async def forward_port(self, serve: Serve, *, port: int = FORWARDED_PORT) -> ForwardedPort:
        """Opens a forwarded port; see `ServingContainer.forward_port`.

        The traffic of the port is not recorded in the journal, and does not count as calls of the agent.

        Raises:
            PortForwardingError: The backend failed to open the port, or does not support forwarded ports.
            EpisodeStateError: The agent is deterministic. A replay from its journal would lack the traffic of the port.
            ContainerDiedError: The container has ended.
        """
        if self._runtime.journal is not None:
            raise EpisodeStateError(
                "A deterministic agent cannot open a forwarded port, because requests through the port are not in the "
                "journal and cannot be replayed. Set `deterministic = False` on its factory."
            )
        if not isinstance(self._container, ServingContainer):
            raise PortForwardingError(
                f"A {type(self._container).__name__} cannot forward ports (it has no `forward_port`). Use "
                "container=local, container=docker or container=daytona."
            )
        with self._noting_death():
            return await self._container.forward_port(serve, port=port)

    async def _exec(self, command: str, options: ExecOptions) -> ExecResult:
        options = {**options, "env": {**(options.get("env") or {}), **self._env}}
        if options.get("user") is None:
            options["user"] = self._user
        if self._shell is not None:
            options.setdefault("shell", self._shell)
        if not self._limit_commands:
            options["timeout_sec"] = None
        result: ExecResult | None = None
        started = time.perf_counter()
        try:
            with self._noting_death():
                result = await self._container.exec(command, **options)
        finally:
            self._activity.add_command(
                CommandRecord(
                    command,
                    exit_code=result.exit_code if result is not None else None,
                    duration_sec=time.perf_counter() - started,
                    timed_out=result is not None and result.timed_out,
                )
            )
        return result

    async def _upload(self, source: str | Path, target: str | Path) -> str | None:
        await self._transfer(self._container.upload(source, target))
        return await asyncio.to_thread(digest_of, Path(source)) if self._runtime.journal is not None else None

    async def _download(self, source: str | Path, target: str | Path) -> HostFiles | None:
        await self._transfer(self._container.download(source, target))
        return await asyncio.to_thread(HostFiles.read, Path(target)) if self._runtime.journal is not None else None

    async def _transfer(self, copying: Coroutine[Any, Any, None]) -> None:
        with self._noting_death(), self._activity.timed():
            await copying

    @contextmanager
    def _noting_death(self) -> Iterator[None]:
        try:
            yield
        except ContainerDiedError as error:
            self.died = error
            raise
