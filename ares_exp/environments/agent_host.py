"""The agent host, which runs one code agent and is the agent's only connection to the LLM and the container.

Each LLM call and each container call of the agent is recorded in a journal, so that the agent can be replayed later. An
LLM call becomes the environment's pending observation, and waits until `respond` gets the policy's response. The
`HostedContainer`, which is the container as the agent sees it, executes and times the container calls.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

from ares_exp.agents.code_agent import (
    AccountedAgent,
    CodeAgent,
    CodeAgentFactory,
    ContextualAgent,
    CountingAgent,
    StatefulAgent,
)
from ares_exp.agents.runtime.agent_runtime import AgentRuntime
from ares_exp.agents.runtime.journal import Call, CallEntry, HostFiles, Journal, UnheardEntry, digest_of
from ares_exp.cancellation import finish
from ares_exp.containers.activity import Activity, CommandRecord
from ares_exp.containers.container import Container, ExecOptions, ExecResult, Shell, TerminalOutput, User
from ares_exp.containers.forwarded_port import FORWARDED_PORT, ForwardedPort, Serve, ServingContainer
from ares_exp.containers.terminal import TerminalContainer, TerminalSession
from ares_exp.errors import (
    AgentError,
    AgentSetupTimeoutError,
    ContainerDiedError,
    ContainerError,
    DivergenceError,
    EpisodeError,
    EpisodeStateError,
    NoRequestError,
    PortForwardingError,
    SnapshotBusyError,
    SnapshotMismatchError,
    UnansweredError,
)
from ares_exp.llms.request import LLMClient, LLMRequest, Message
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import AgentFacts
from ares_exp.tasks.task_contract import AgentContext


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


@dataclass(frozen=True, slots=True)
class AgentState:
    """The saved state of an agent that has `get_state` and `set_state`, as a snapshot contains it.

    Attributes:
        version: The agent's `state_version` when the snapshot was taken.
        data: Return value of the agent's `get_state`.
    """

    version: Any
    data: Any


async def _ask(runtime: AgentRuntime, request: LLMRequest) -> LLMResponse:
    """Sends a request of the agent to the policy. Raises `TypeError` for an invalid request."""
    example = 'LLMRequest([{"role": "user", "content": text}])'
    if not isinstance(request, LLMRequest):
        raise TypeError(f"Expected llm_client to receive an LLMRequest, got {type(request).__name__}. Use {example}.")
    for message in request.messages:
        if type(message) is not Message or "role" not in message:
            raise TypeError(
                f"Expected the messages of an LLMRequest to be mappings with a `role`, got {message!r:.80}. Use "
                f"{example}."
            )
    response: LLMResponse = await runtime.call("llm", request)
    return response


def with_state(agent: CodeAgent, state: AgentState) -> StatefulAgent:
    """Passes a saved state to the agent's `set_state` and returns the agent.

    Raises:
        SnapshotMismatchError: The agent has no `set_state`, its `state_version` differs from the saved version, or
            `set_state` raises `ValueError`.
    """
    kind = type(agent).__name__
    if not isinstance(agent, StatefulAgent):
        raise SnapshotMismatchError(
            f"The snapshot contains a state of the agent, but {kind} has no set_state() to load it. Add this method."
        )
    if agent.state_version != state.version:
        raise SnapshotMismatchError(
            f"The snapshot has version {state.version!r:.40} of the agent's state, but {kind} supports version "
            f"{agent.state_version!r}. Restore the snapshot with the version of the agent that wrote it."
        )
    try:
        agent.set_state(state.data)
    except ValueError as error:
        raise SnapshotMismatchError(f"{kind} cannot load the state in the snapshot: {error}") from None
    return agent


NO_CONTEXT = AgentContext()
FIRST_REQUEST_GRACE_SEC = 2.0
"""Seconds for which the host still waits for the agent's first request after the agent's time limit has passed."""
CANCEL_GRACE_SEC = 5.0
"""Time limit in seconds for a cancelled agent to end, including the time to kill its running command."""


class TimeIsUpError(Exception):
    """The agent's time limit has passed, so the environment ends the stage with `truncated_by="time"`."""


class AgentHost:
    """Runs one agent, and passes its LLM calls to the environment.

    An agent may make several LLM calls at the same time. They become observations one after the other, in the order in
    which the agent made them.

    Attributes:
        agent: The agent; `None` until it is created.
        runtime: Runtime that runs the agent and writes its journal.
        observed: LLM call whose request is the pending observation; `None` if no observation is pending.
    """

    def __init__(
        self,
        container: Container,
        journal: Journal | None,
        *,
        user: User | None = None,
        shell: Shell | None = None,
        env: Mapping[str, str] | None = None,
        limit_commands: bool = True,
        activity: Activity | None = None,
        on_requests: Callable[[], None] = lambda: None,
        background_client: LLMClient | None = None,
    ) -> None:
        """Prepares to run an agent in `container`, without creating the agent.

        Args:
            container: The started container.
            journal: Journal to which the agent's calls are written; `None` for an agent that is not deterministic.
            user: Default user of the agent's commands.
            shell: Default shell of the agent's commands; `None` means the shell of the container's backend.
            env: Environment variables of every command. They override variables that the agent sets for a command.
            limit_commands: Whether a time limit that the agent sets for a command is applied. If not, commands have no
                time limit.
            activity: Object to which the times and commands of all container calls are added.
            on_requests: Callback for LLM calls that the agent starts or cancels while another LLM call is pending.
            background_client: LLM client that responds to background requests (`Origin.is_background`). With `None`,
                these requests also become observations.
        """
        self._background_client = background_client
        self._background_requests: set[asyncio.Task[None]] = set()
        self._has_responded_in_background = False
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._on_requests = on_requests
        self.agent: CodeAgent | None = None
        self.runtime = AgentRuntime(journal, on_llm=self._asked, on_change=self._notify)
        self.observed: Call | None = None
        self._hosted = HostedContainer(
            container,
            self.runtime,
            user=user,
            shell=shell,
            env=env or {},
            limit_commands=limit_commands,
            activity=activity or Activity(),
        )
        self._pending: deque[Call] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_sec: float | None = None
        self._time_is_up = False
        self._requests = 0

    @property
    def format_errors(self) -> int:
        """Number of replies that the agent could not use; 0 if the agent does not count them."""
        return self.agent.format_errors if isinstance(self.agent, CountingAgent) else 0

    @property
    def agent_facts(self) -> AgentFacts | None:
        """Version and request counts of an installed agent such as Claude Code; `None` for other agents."""
        return self.agent.facts if isinstance(self.agent, AccountedAgent) else None

    def start(
        self,
        factory: CodeAgentFactory,
        instruction: str,
        *,
        timeout_sec: float | None,
        context: AgentContext = NO_CONTEXT,
    ) -> None:
        """Creates an agent with `factory` and runs it on `instruction`.

        `context` contains the parts of the task that the agent gets in addition to the instruction. The time limit
        `timeout_sec` starts at this call.
        """
        self._timeout_sec = timeout_sec
        self._limit(timeout_sec)
        self.runtime.start(lambda: self._run(factory, instruction, context))

    def restore(
        self,
        factory: CodeAgentFactory,
        instruction: str,
        *,
        timeout_sec: float | None,
        elapsed_sec: float,
        context: AgentContext = NO_CONTEXT,
        state: AgentState | None = None,
        originals: Mapping[int, LLMRequest] | None = None,
    ) -> None:
        """Brings an agent back to the point where its snapshot was taken. For the other arguments, see `start`.

        An agent with a journal is replayed: it runs again, and gets the recorded results of its calls. No call is
        executed. An agent without a journal is restored from its `state` instead.

        `timeout_sec` is the agent's total time limit, of which it has already used `elapsed_sec`. `originals` contains
        the recorded requests by call id, for error messages.

        Raises:
            JournalError: The agent did not reach the end of its journal.
        """
        self._timeout_sec = timeout_sec
        self._limit(None if timeout_sec is None else max(0.0, timeout_sec - elapsed_sec))
        journal, agent = self.runtime.journal, lambda: self._run(factory, instruction, context, state)
        if journal is None:
            self.runtime.start(agent, elapsed_sec=elapsed_sec)
            return
        self.runtime.replay(agent, elapsed_sec=elapsed_sec, originals=originals)
        requests = {e.call_id: e.arguments for e in journal.entries if isinstance(e, CallEntry) and e.kind == "llm"}
        self._requests = len(requests)
        shown = [step.call_id for step in journal.steps()][-1]
        given_up = Call(shown, "llm", requests[shown])  # if the agent had cancelled the call, its response is ignored
        self.observed = next((call for call in self._pending if call.call_id == shown), given_up)

    def rerun_finished_stage(self, factory: CodeAgentFactory, instruction: str, *, context: AgentContext) -> None:
        """Replays the agent of a finished stage, so that its journal contains the complete LLM requests again.

        A journal in a snapshot contains only digests of the requests. After the replay, the caller must call `cancel`.

        Raises:
            JournalError: The agent acted differently from its journal.
        """
        self.runtime.rerun_finished_stage(lambda: self._run(factory, instruction, context))

    def _limit(self, timeout_sec: float | None) -> None:
        if timeout_sec is not None:
            self._timer = self._loop.call_later(timeout_sec, self._expire)

    async def _run(
        self, factory: CodeAgentFactory, instruction: str, context: AgentContext, state: AgentState | None = None
    ) -> None:
        """Creates and runs the agent. If the agent calls `sys.exit()`, raises an `AgentError`."""
        try:
            # The agent must not refer to this host: a reference cycle would keep ended episodes in memory.
            self.agent = factory(container=self._hosted, llm_client=partial(_ask, self.runtime))
            if context.needs:
                if not isinstance(self.agent, ContextualAgent):
                    kind = type(self.agent).__name__
                    raise AgentError(
                        f"The task has more data than its instruction, but {kind} has no set_context() to receive it. "
                        "Add this method, or choose another agent."
                    )
                self.agent.set_context(context)
            if state is None:
                working: object = self.agent.run(instruction)
            else:
                working = with_state(self.agent, state).resume(instruction)
            if not inspect.isawaitable(working):
                raise AgentError(
                    f"Expected `{type(self.agent).__name__}.run` to be asynchronous, got {type(working).__name__}, "
                    "which cannot be awaited. Define it with `async def`."
                )
            await working
        except SystemExit as error:
            raise AgentError(f"The code agent called sys.exit({error.code!r}).") from error

    async def first_request(self) -> None:
        """Waits for the agent's first request, at most until `FIRST_REQUEST_GRACE_SEC` after the agent's time limit.

        The grace period gives an episode with a short time limit a FIRST observation. An agent whose request comes
        after its time limit never gets a response, because `respond` then raises `TimeIsUpError`.

        Raises:
            AgentSetupTimeoutError: The agent sent no request before the end of the grace period.
            AgentError, ContainerError: See `next_request`.
        """
        with suppress(TimeIsUpError):
            await self.next_request()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REQUEST_GRACE_SEC):
                await self.next_request(late=True)
                return
        raise AgentSetupTimeoutError(f"The code agent sent no LLM request within its limit of {self._timeout_sec:g} s.")

    async def next_request(self, *, late: bool = False) -> LLMRequest | None:
        """Waits for the agent's next LLM call and returns its request, or `None` if the agent has ended.

        If `late` is true, the agent's time limit is ignored.

        Raises:
            AgentError, ContainerError: The agent raised an exception, or its container failed.
            TimeIsUpError: The agent's time limit has passed.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            task = self.runtime.task
            if task is not None and task.done():
                self._raise_if_failed(task)
                return None
            if self._time_is_up and not late:
                raise TimeIsUpError
            if (why := self.runtime.blocked) is not None:
                raise AgentError(why)
            while self._pending and not self._pending[0].is_open:
                self._pending.popleft()  # the agent cancelled the call
            if self._pending:
                self.observed = self._pending[0]
                return cast("LLMRequest", self.observed.arguments)
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    @property
    def pending(self) -> Sequence[Call]:
        """LLM calls that wait for a response: the observed call (even if cancelled), then the others in call order."""
        others = [call for call in self._pending if call is not self.observed and call.is_open]
        return [self.observed, *others] if self.observed is not None else others

    @property
    def time_left_sec(self) -> float | None:
        """Seconds until the agent's time limit; `None` if it has no time limit."""
        return None if self._timer is None else max(0.0, self._timer.when() - self._loop.time())

    def grant_time(self, seconds: float) -> None:
        """Extends the agent's time limit by `seconds`, unless the limit has already passed."""
        if self._timer is not None and not self._time_is_up:
            self._timer.cancel()
            self._limit(self._timer.when() + seconds - self._loop.time())

    def respond(self, response: LLMResponse | None) -> None:
        """Passes the policy's response to the agent's observed LLM call.

        If the agent has cancelled the call, the response is only recorded in the journal.

        Raises:
            TimeIsUpError: The policy did not respond in time (`response` is `None`). Or the response came after the
                agent's time limit, so the agent does not get it.
        """
        if response is None:
            raise TimeIsUpError
        call, self.observed = self.observed, None
        if call is not None and call.is_open and not self._time_is_up:
            self._pending.remove(call)
            self.runtime.deliver(call, response)
        elif call is not None and self.runtime.journal is not None:
            self.runtime.journal.entries.append(UnheardEntry(call.call_id, response))
        if self._time_is_up:
            raise TimeIsUpError

    async def quiesce(self, timeout_sec: float) -> None:
        """Pauses the agent for a snapshot, after its running commands and other calls have ended.

        LLM calls that wait for the policy may stay open. New calls are delayed until `runtime.release`.

        Raises:
            SnapshotBusyError: A call is still running after `timeout_sec`.
        """
        deadline = time.monotonic() + timeout_sec
        while busy := self.runtime.in_flight:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SnapshotBusyError(
                    f"Cannot capture the agent's state: {len(busy)} of the agent's calls ({busy[0].kind}) did not end "
                    f"within {timeout_sec:g} s. Take the snapshot at a step where the agent only waits for its LLM."
                )
            if works := [call.work for call in busy if isinstance(call.work, asyncio.Task)]:
                await asyncio.wait(works, timeout=left)
            await asyncio.sleep(0)  # the agent gets the results, and may send new calls
        self.runtime.hold()

    async def cancel(self) -> None:
        """Cancels the agent and its background requests, and closes its terminal.

        Waits up to `CANCEL_GRACE_SEC` until the agent's commands have ended.
        """
        if self._timer is not None:
            self._timer.cancel()
        for background_request in self._background_requests:
            background_request.cancel()
        await self.runtime.cancel(CANCEL_GRACE_SEC)
        if self._background_requests:
            await finish(asyncio.wait(self._background_requests, timeout=CANCEL_GRACE_SEC))
        self._background_client = None
        await self._hosted.close_terminal()

    def _raise_if_failed(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            raise AgentError("The code agent was cancelled, but not by its environment. It must not cancel itself.")
        error = task.exception()
        if error is None:
            if self._requests:
                return
            raise NoRequestError(
                "The code agent sent only background requests (requests without tools), which are not steps of the "
                "episode. To make them steps, set agent.background_requests=observe."
                if self._has_responded_in_background
                else "The code agent ended without sending an LLM request."
            )
        if self._hosted.died is not None:
            raise self._hosted.died
        if isinstance(error, EpisodeError | SnapshotMismatchError):
            raise error
        raise AgentError(f"The code agent raised {type(error).__name__}: {error}") from error

    def _asked(self, call: Call) -> None:
        request = call.arguments
        if self._background_client is not None and request.origin is not None and request.origin.is_background:
            self._has_responded_in_background = True
            background_request = asyncio.create_task(
                self._respond_in_background(self._background_client, call), name="background request of an agent"
            )
            self._background_requests.add(background_request)
            background_request.add_done_callback(self._background_requests.discard)
            return
        self._requests += 1
        self._pending.append(call)
        if len(self._pending) > 1:
            self._on_requests()

    async def _respond_in_background(self, background_client: LLMClient, call: Call) -> None:
        """Sends a background request to `background_client`. If the client fails, the episode fails."""
        try:
            response = await background_client(call.arguments)
        except UnansweredError:
            return  # as in the recorded episode, the call waits until the agent's time limit
        except Exception as error:
            self._failure = error
            self._notify()
            return
        self.runtime.deliver(call, response)

    def _expire(self) -> None:
        if self.runtime.task is not None and not self.runtime.task.done():
            self._time_is_up = True
            self._notify()

    def _notify(self) -> None:
        if not all(call.is_open for call in self._pending):
            self._on_requests()
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
