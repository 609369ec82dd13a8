"""The agent host: runs one code agent and is the only door between it and the world.

Whatever the agent asks of the LLM or the container passes `AgentHost.call`: the one place where a call can be counted,
recorded or answered from a record. An LLM call becomes a pending observation and waits for its action.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from ares_exp.agents.code_agent import CodeAgentFactory
from ares_exp.containers.container import Container, ExecOptions, ExecResult, User
from ares_exp.environments.activity import Activity, CommandRecord
from ares_exp.errors import AgentError, ContainerDiedError, EpisodeError, EpisodeStateError, NoRequestError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse

CANCEL_GRACE_SEC = 5.0
"""How long a cancelled agent may take to unwind; its running command is killed on the way."""


class TimeIsUpError(Exception):
    """The agent's time limit has passed."""


@dataclass(slots=True, eq=False)
class _PendingCall:
    request: LLMRequest
    answer: asyncio.Future[LLMResponse]


class AgentHost:
    """One agent at work. Concurrent LLM calls are served one at a time, in the order in which they were made."""

    def __init__(
        self,
        container: Container,
        *,
        user: User | None = None,
        env: Mapping[str, str] | None = None,
        limit_commands: bool = True,
        activity: Activity | None = None,
    ) -> None:
        """Prepares the door.

        Args:
            container: The started container.
            user: Who runs the agent's commands unless it says otherwise.
            env: Variables that every command of the agent gets on top of its own.
            limit_commands: Whether the agent's own limits on single commands hold; the oracle's solution runs under
                the limit of the whole agent phase only.
            activity: Is told of every call of the container.
        """
        self._container = container
        self._user = user
        self._env = dict(env or {})
        self._limit_commands = limit_commands
        self.activity = activity or Activity()
        self._pending: deque[_PendingCall] = deque()
        self._observed: _PendingCall | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._time_is_up = False
        self._closed = False
        self._callers: set[asyncio.Task[Any]] = set()
        self._container_died: ContainerDiedError | None = None
        self._requests = 0

    def start(self, factory: CodeAgentFactory, instruction: str, *, timeout_sec: float | None) -> None:
        """Starts the agent on `instruction`; its time runs from now."""
        loop = asyncio.get_running_loop()
        if timeout_sec is not None:
            self._deadline = time.monotonic() + timeout_sec
            self._timer = loop.call_later(timeout_sec, self._expire)
        self._task = loop.create_task(self._run(factory, instruction), name="code agent")
        self._task.add_done_callback(lambda _: self._notify())

    async def _run(self, factory: CodeAgentFactory, instruction: str) -> None:
        """Makes and runs the agent; a `sys.exit()` in it must end its episode, not the loop of all the others."""
        try:
            await factory(container=_HostedContainer(self), llm_client=_HostedLLM(self)).run(instruction)
        except SystemExit as error:
            raise AgentError(f"The code agent called sys.exit({error.code!r}).") from error

    async def call(self, kind: str, perform: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Lets one call of the agent through; `kind` is `llm`, `exec`, `upload` or `download`.

        Raises:
            EpisodeStateError: The agent phase is over: what the agent left running may touch nothing any more.
        """
        caller = asyncio.current_task()
        if self._closed or caller is None:
            raise EpisodeStateError(f"The agent phase is over: no more {kind} calls.")
        self._callers.add(caller)
        try:
            return await perform(*args, **kwargs)
        except ContainerDiedError as error:
            self._container_died = error
            raise
        finally:
            self._callers.discard(caller)

    async def next_request(self, *, late: bool = False) -> LLMRequest | None:
        """Waits for the agent's next LLM call, if `late` past its time limit; `None` when it has returned instead.

        Raises:
            AgentError, ContainerError: The agent raised; its container failing is told apart from its own fault.
            TimeIsUpError: The agent's time limit has passed.
        """
        while True:
            if self._task is None or self._task.done():
                self._raise_if_failed()
                return None
            if self._time_is_up and not late:
                raise TimeIsUpError
            if self._pending:
                self._observed = self._pending[0]
                return self._observed.request
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    @property
    def time_left_sec(self) -> float | None:
        """Seconds until the agent's time limit; `None` without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def answer(self, response: LLMResponse | None) -> None:
        """Gives the observed LLM call its answer; one that the agent gave up meanwhile gets none.

        Raises:
            TimeIsUpError: There is no answer (`None`), or it came after the agent's time limit: the agent gets none.
        """
        if self._time_is_up or response is None:
            raise TimeIsUpError
        call, self._observed = self._observed, None
        if call is not None and not call.answer.done():
            self._pending.remove(call)
            call.answer.set_result(response)

    async def cancel(self) -> None:
        """Closes the door, cancels what still runs of the agent and waits, bounded, for its commands to be dead."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = {task for task in (self._task, *self._callers) if task is not None and not task.done()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_SEC)
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.exception()  # seen here: asyncio would report it again as never retrieved

    async def ask(self, request: LLMRequest) -> LLMResponse:
        """Parks an LLM call of the agent until `answer`."""
        self._requests += 1
        call = _PendingCall(request, asyncio.get_running_loop().create_future())
        self._pending.append(call)
        self._notify()
        try:
            return await call.answer
        finally:
            if call in self._pending:  # the agent gave the call up itself
                self._pending.remove(call)

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Runs a command of the agent in the container."""
        if options.get("user") is None:
            options["user"] = self._user
        if not self._limit_commands:
            options["timeout_sec"] = None
        options["env"] = {**(options.get("env") or {}), **self._env}
        result: ExecResult | None = None
        began = time.perf_counter()
        try:
            result = await self._container.exec(command, **options)
        finally:
            seconds = time.perf_counter() - began
            self.activity.add_command(
                CommandRecord(
                    command,
                    exit_code=result.exit_code if result is not None else None,
                    duration_sec=seconds,
                    timed_out=result is not None and result.timed_out,
                )
            )
        return result

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Copies into the container for the agent."""
        with self.activity.timed():
            await self._container.upload(source, target)

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Copies out of the container for the agent."""
        with self.activity.timed():
            await self._container.download(source, target)

    def _raise_if_failed(self) -> None:
        if self._task is None or self._task.cancelled():
            raise AgentError("The code agent was cancelled, and not by its environment.")
        error = self._task.exception()
        if error is None and self._requests == 0:
            raise NoRequestError("The code agent ended without a single LLM request: there is nothing to observe.")
        if error is None:
            return
        if self._container_died is not None:
            raise self._container_died
        if isinstance(error, EpisodeError):
            raise error
        raise AgentError(f"The code agent raised {type(error).__name__}: {error}") from error

    def _expire(self) -> None:
        if self._task is not None and not self._task.done():
            self._time_is_up = True
            self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class _HostedLLM:
    """The LLM client that the agent holds."""

    def __init__(self, host: AgentHost) -> None:
        self._host = host

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        response: LLMResponse = await self._host.call("llm", self._host.ask, request)
        return response


class _HostedContainer:
    """The container that the agent holds."""

    def __init__(self, host: AgentHost) -> None:
        self._host = host

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        result: ExecResult = await self._host.call("exec", self._host.exec, command, **options)
        return result

    async def upload(self, source: str | Path, target: str | Path) -> None:
        await self._host.call("upload", self._host.upload, source, target)

    async def download(self, source: str | Path, target: str | Path) -> None:
        await self._host.call("download", self._host.download, source, target)
