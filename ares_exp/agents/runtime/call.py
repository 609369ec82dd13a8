"""A call of an agent that has no completion yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ares_exp.agents.runtime.journal import CallKind


@dataclass(slots=True, eq=False)
class Call:
    """Something that the agent asked for.

    Attributes:
        call_id: Its number in the journal.
        kind: What the agent asked for.
        arguments: What identifies it; see `CallEntry`.
        perform: Carries it out, on the event loop outside. An LLM call has none, and waits for its answer.
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
