"""The in-memory journal of one agent: all its calls, the results of these calls, and the time steps, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ares_exp.containers.activity import CommandRecord
from ares_exp.llms.response import LLMResponse

CallKind = Literal["llm", "exec", "upload", "download", "terminal", "timer", "thread"]


@dataclass(frozen=True, slots=True)
class CallEntry:
    """A call from the agent, such as a command in the container or an LLM request.

    Attributes:
        call_id: Number of the call, starting at 0.
        kind: Kind of the call.
        arguments: Immutable arguments, which depend on the kind. `llm`: the `LLMRequest`; `exec`: the command and its
            options; `upload` and `download`: the path in the container; `terminal`: the keys, the seconds and the size;
            `timer`: the seconds; `thread`: the name of the function.
    """

    call_id: int
    kind: CallKind
    arguments: Any


@dataclass(frozen=True, slots=True)
class DoneEntry:
    """The result of a call. Its place in the journal shows when it was delivered to the agent.

    Attributes:
        call_id: Number of the call.
        at: Time of the delivery, in seconds since the agent started.
        value: Result, such as an `LLMResponse` or an `ExecResult`; `None` for timers and threads.
        error: Exception that the call raised; `None` if it returned a value.
    """

    call_id: int
    at: float
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A time step: the environment returned an LLM request of the agent as its observation.

    Attributes:
        call_id: Number of the LLM call.
        timestamp: Time in epoch seconds.
        reward: Reward of the time step; `None` for the first time step.
        policy_sec: Seconds that the policy needed to respond to the previous time step; `None` for the first time step.
        environment_sec: Duration of the time step in seconds.
        container_sec: Part of the duration that was spent in the container.
        commands: Commands that the agent ran during the time step.
    """

    call_id: int
    timestamp: float
    reward: float | None = None
    policy_sec: float | None = None
    environment_sec: float = 0.0
    container_sec: float = 0.0
    commands: tuple[CommandRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class SeedEntry:
    """A change of the agent's random seed to `seed`. It marks the point at which a branch of the episode starts."""

    seed: int


@dataclass(frozen=True, slots=True)
class UnheardEntry:
    """A response from the policy that the agent did not get, because it had cancelled the call or its time was up."""

    call_id: int
    response: LLMResponse


Entry = CallEntry | DoneEntry | StepEntry | SeedEntry | UnheardEntry


@dataclass(slots=True)
class Journal:
    """The events of one agent so far. A replay of these events restores the agent.

    Attributes:
        started_at: Start time of the agent in epoch seconds.
        seed: Initial seed of the agent's random generators.
        entries: Entries in order.
    """

    started_at: float
    seed: int
    entries: list[Entry] = field(default_factory=list)

    def steps(self) -> Iterator[StepEntry]:
        """Returns an iterator over the time steps, in order."""
        return (entry for entry in self.entries if isinstance(entry, StepEntry))


@dataclass(slots=True, eq=False)
class Call:
    """A call from the agent, and the state of its execution.

    Attributes:
        call_id: Number in the journal.
        kind: Kind of the call.
        arguments: Arguments that identify the call; see `CallEntry`.
        perform: Function that executes the call on the outer event loop. `None` for an LLM call, which waits for its
            response.
        again: Function that a replay calls instead of `perform`. It takes the recorded value, and returns the value for
            the agent. With `None`, the agent gets the recorded value.
        future: Future that the agent awaits; `None` for a timer.
        handle: Handle to run when the timer expires; `None` for other calls.
        work: Task or timer that executes the call; `None` if the call is not being executed.
        is_open: Whether the agent waits for the call.
    """

    call_id: int
    kind: CallKind
    arguments: Any
    perform: Callable[[], Awaitable[Any]] | None = None
    again: Callable[[Any], Any] | None = None
    future: asyncio.Future[Any] | None = None
    handle: asyncio.TimerHandle | None = None
    work: asyncio.Task[Any] | asyncio.TimerHandle | None = None
    is_open: bool = False
