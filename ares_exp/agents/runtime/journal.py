"""The journal of one episode, in memory: every call of the agent, every completion, every time step, in order."""

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
    """The agent asked for something.

    Attributes:
        call_id: Number of the call, from 0.
        kind: What it asked for.
        arguments: Of `llm` the `LLMRequest`; of `exec` the command and its options; of `upload` and `download` the
            path in the container; of `terminal` the keys, the seconds and the size; of a
            `timer` the seconds; of a `thread` the function's name. Nothing that can change.
    """

    call_id: int
    kind: CallKind
    arguments: Any


@dataclass(frozen=True, slots=True)
class DoneEntry:
    """The outcome of a call, delivered to the agent.

    Attributes:
        call_id: Number of the call.
        at: The agent's clock then, seconds since it started.
        value: The outcome: an `LLMResponse`, an `ExecResult`, …; `None` of timers and threads.
        error: What was raised instead.
    """

    call_id: int
    at: float
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StepEntry:
    """The environment showed an LLM call as its observation.

    Attributes:
        call_id: Number of the call.
        timestamp: Epoch seconds.
        reward: Of that time step; `None` on FIRST.
        policy_sec: Seconds from the time step before to its response; `None` on FIRST.
        environment_sec: Seconds that the time step took.
        container_sec: Seconds of the container's in them.
        commands: What the agent ran in them.
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
    """From here on the agent drew other values: it went on as one of several branches.

    Attributes:
        seed: With this seed.
    """

    seed: int


@dataclass(frozen=True, slots=True)
class UnheardEntry:
    """A response of the policy to an LLM call that the agent had given up meanwhile.

    Attributes:
        call_id: Number of the call.
        response: The response.
    """

    call_id: int
    response: LLMResponse


Entry = CallEntry | DoneEntry | StepEntry | SeedEntry | UnheardEntry


@dataclass(slots=True)
class Journal:
    """The events of an episode so far.

    Attributes:
        started_at: Epoch seconds at which the agent started.
        seed: Seed of what the agent draws, at first.
        entries: In order.
    """

    started_at: float
    seed: int
    entries: list[Entry] = field(default_factory=list)

    def steps(self) -> Iterator[StepEntry]:
        """Returns the time steps, in order."""
        return (entry for entry in self.entries if isinstance(entry, StepEntry))


@dataclass(slots=True, eq=False)
class Call:
    """Something that the agent asked for.

    Attributes:
        call_id: Its number in the journal.
        kind: What the agent asked for.
        arguments: What identifies it; see `CallEntry`.
        perform: Carries it out, on the event loop outside. An LLM call has none, and waits for its response.
        again: Takes the place of that when the agent is run again: from the recorded outcome to the outcome.
        future: What the agent awaits; `None` of a timer.
        handle: Of a timer, what is to be run.
        work: What carries it out at the moment.
        is_open: Whether the agent waits for it.
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
