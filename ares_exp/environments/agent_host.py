"""The agent host, which runs one code agent and is the agent's only connection to the LLM and the container.

All requests from the agent to the LLM or the container go through the runtime's journal. An LLM call becomes a pending
observation and waits for its action.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from ares_exp.agents.code_agent import (
    AccountedAgent,
    CodeAgent,
    CodeAgentFactory,
    ContextualAgent,
    CountingAgent,
    StatefulAgent,
)
from ares_exp.agents.runtime.agent_runtime import AgentRuntime
from ares_exp.agents.runtime.journal import Call, CallEntry, Journal, UnheardEntry
from ares_exp.cancellation import finish
from ares_exp.containers.activity import Activity
from ares_exp.containers.container import Container, Shell, User
from ares_exp.environments.hosted_container import HostedContainer
from ares_exp.errors import (
    AgentError,
    AgentSetupTimeoutError,
    EpisodeError,
    NoRequestError,
    SnapshotBusyError,
    SnapshotMismatchError,
    UnansweredError,
)
from ares_exp.llms.request import LLMClient, LLMRequest, Message
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import AgentFacts
from ares_exp.tasks.task_contract import AgentContext


@dataclass(frozen=True, slots=True)
class AgentState:
    """The state of an agent in a snapshot.

    Attributes:
        version: The agent's `state_version` when the snapshot was taken.
        data: Result of the agent's `get_state`.
    """

    version: Any
    data: Any


class HostedLLM:
    """The LLM client that the agent uses."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self._runtime = runtime

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Sends a request to the policy. Raises `TypeError` if `request` is not a valid `LLMRequest`."""
        example = 'LLMRequest([{"role": "user", "content": text}])'
        if not isinstance(request, LLMRequest):
            raise TypeError(
                f"Expected llm_client to receive an LLMRequest, got {type(request).__name__}. Use {example}."
            )
        for message in request.messages:
            if type(message) is not Message or "role" not in message:
                raise TypeError(
                    f"Expected the messages of an LLMRequest to be mappings with a `role`, got {message!r:.80}. Use "
                    f"{example}."
                )
        response: LLMResponse = await self._runtime.call("llm", request)
        return response


def with_state(agent: CodeAgent, state: AgentState) -> StatefulAgent:
    """Restores the agent's state and returns the agent.

    Raises:
        SnapshotMismatchError: The agent has no `set_state`, its `state_version` differs, or it rejects the state.
    """
    kind = type(agent).__name__
    if not isinstance(agent, StatefulAgent):
        raise SnapshotMismatchError(
            f"The snapshot contains a state of the agent, but {kind} has no set_state() to load it."
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
"""Additional time in seconds after the time limit for the agent's first request."""
CANCEL_GRACE_SEC = 5.0
"""Time limit in seconds for a cancelled agent to end, including the time to kill its running command."""


class TimeIsUpError(Exception):
    """The agent's time limit has passed."""


class AgentHost:
    """Runs one agent. Concurrent LLM calls become observations one at a time, in the order of the calls.

    Attributes:
        agent: The agent; `None` until it is created.
        runtime: Runtime of the agent.
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
        """Prepares the runtime, and the container object for the agent.

        Args:
            container: The started container.
            journal: Journal of the agent's calls; `None` for an agent that is not deterministic.
            user: Default user of the agent's commands.
            shell: Default shell of the agent's commands; `None` means the shell of the container's backend.
            env: Environment variables that are set for every command, in addition to the variables of the command.
            limit_commands: Whether the agent's own time limits on single commands apply.
            activity: Record to which every call to the container is added.
            on_requests: Callback that is called if `pending` changes while a request is pending.
            background_client: LLM client for background requests (`Origin.is_background`); `None` makes all requests
                observations.
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
        self._deadline: float | None = None
        self._timeout_sec: float | None = None
        self._time_is_up = False
        self._requests = 0

    @property
    def format_errors(self) -> int:
        """Number of replies that the agent could not use; 0 if the agent does not count them."""
        return self.agent.format_errors if isinstance(self.agent, CountingAgent) else 0

    @property
    def agent_facts(self) -> AgentFacts | None:
        """Facts that an installed agent has reported so far; `None` for other agents."""
        return self.agent.facts if isinstance(self.agent, AccountedAgent) else None

    def start(
        self,
        factory: CodeAgentFactory,
        instruction: str,
        *,
        timeout_sec: float | None,
        context: AgentContext = NO_CONTEXT,
    ) -> None:
        """Starts the agent with `instruction` and the additional data in `context`.

        The agent's time limit starts at this call.
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
        """Replays an agent up to the end of its journal, without executing any call. See `start` for the arguments.

        An agent without a journal is restored from its `state` instead. `timeout_sec` is the agent's total time
        limit, of which it has already used `elapsed_sec`. `originals` contains the recorded requests by call id, which
        are only needed for error messages.

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
        """Replays an agent that has ended, to recreate its LLM requests. The caller must cancel the replayed agent.

        Raises:
            JournalError: The agent acted differently from its journal.
        """
        self.runtime.rerun_finished_stage(lambda: self._run(factory, instruction, context))

    def _limit(self, timeout_sec: float | None) -> None:
        if timeout_sec is not None:
            self._deadline = self._loop.time() + timeout_sec
            self._timer = self._loop.call_later(timeout_sec, self._expire)

    async def _run(
        self, factory: CodeAgentFactory, instruction: str, context: AgentContext, state: AgentState | None = None
    ) -> None:
        """Creates and runs the agent. If the agent calls `sys.exit()`, raises an `AgentError`."""
        try:
            self.agent = factory(container=self._hosted, llm_client=HostedLLM(self.runtime))
            if context.needs:
                if not isinstance(self.agent, ContextualAgent):
                    kind = type(self.agent).__name__
                    raise AgentError(
                        f"The task has more than an instruction, but {kind} has no set_context() for the other data."
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
        """Waits for the agent's first request, for up to `FIRST_REQUEST_GRACE_SEC` after the agent's time limit.

        If the request comes after the agent's time limit, the agent does not get a response; see `respond`.

        Raises:
            AgentSetupTimeoutError: The agent did not send a request in this time.
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
        """Waits for the agent's next LLM call. Returns `None` if the agent has ended. If `late`, ignores the limit.

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
        """LLM calls that wait for a response: first the observed call, then the other calls in call order.

        The observed call is included even if the agent has cancelled it.
        """
        others = [call for call in self._pending if call is not self.observed and call.is_open]
        return [self.observed, *others] if self.observed is not None else others

    @property
    def time_left_sec(self) -> float | None:
        """Seconds until the agent's time limit; `None` if it has no time limit."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def grant_time(self, seconds: float) -> None:
        """Extends the agent's time limit by the time that the environment needed, unless the limit has passed."""
        if self._deadline is not None and self._timer is not None and not self._time_is_up:
            self._timer.cancel()
            self._limit(self._deadline + seconds - self._loop.time())

    def respond(self, response: LLMResponse | None) -> None:
        """Passes the response to the observed LLM call, unless the agent has cancelled the call.

        Raises:
            TimeIsUpError: The response is `None`, or came after the agent's time limit, so the agent does not get it.
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
        """Waits until no call from the agent is running, and delays new calls until `runtime.release`.

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
        """Cancels the agent, and waits (at most `CANCEL_GRACE_SEC`) until its commands have ended."""
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
            raise AgentError("The task of the code agent was cancelled, but the environment did not cancel it.")
        error = task.exception()
        if error is None and self._requests == 0:
            if self._has_responded_in_background:
                raise NoRequestError(
                    "The code agent sent only background requests (requests without tools), which are not steps of the "
                    "episode. To make them steps, set agent.background_requests=observe."
                )
            raise NoRequestError("The code agent ended without an LLM request.")
        if error is None:
            return
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
