"""A small deterministic event loop for code agents, without sockets.

The loop runs only while its owner, the `AgentRuntime`, calls `pump`, which runs callbacks until none is ready. The
owner delivers the result of one call to the agent, calls `pump`, and then delivers the next result. If a replay
delivers the same results in the same order, the agent therefore makes the same calls again.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import contextvars
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, TypeVarTuple

from ares_exp.agents.runtime.virtual_clock import VirtualClockAndRandom
from ares_exp.errors import EpisodeStateError, NondeterministicCallError

if TYPE_CHECKING:
    from ares_exp.agents.runtime.agent_runtime import AgentRuntime

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


MAX_CALLBACKS = 200_000
"""Maximum number of callbacks in one call of `pump` (a few tenths of a second), so that an endless loop is stopped."""


class AgentLoop(asyncio.AbstractEventLoop):
    """An event loop that supports only tasks, futures, timers and threads. It rejects all other operations.

    Attributes:
        clock: Clock and random generators of the agent. The owner sets its time, which is the time of the loop.
        owner: Performs timers, threads and error reports. `None` after the agent has ended; they then have no effect.
        ran_away: Whether the agent was stopped because it used up `MAX_CALLBACKS` without waiting for a call.
        tasks: Tasks of the agent that have not been garbage-collected.
    """

    def __init__(self, owner: AgentRuntime, clock: VirtualClockAndRandom) -> None:
        """Creates a loop. `owner` performs operations outside of the loop, such as timers and threads."""
        self.clock = clock
        self.ran_away = False
        self.owner: AgentRuntime | None = owner
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._ready: deque[asyncio.Handle] = deque()

    def pump(self) -> None:
        """Runs callbacks until none is ready. After `MAX_CALLBACKS`, drops the remaining ones and sets `ran_away`.

        While the callbacks run, functions such as `time.time` use the agent's clock and random generators.
        """
        ready, left = self._ready, MAX_CALLBACKS
        outer = asyncio.events._get_running_loop()
        # Since Python 3.14, a thread has one current task, not one per loop. The outer loop's task is removed
        # temporarily, so that tasks of this loop can run.
        outer_task = None if outer is None else asyncio.current_task(outer)
        generators = sys.get_asyncgen_hooks()
        if outer is not None and outer_task is not None:
            asyncio._leave_task(outer, outer_task)
        asyncio.events._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._close_generator)
        try:
            with self.clock:
                while ready:
                    if not left:
                        ready.clear()
                        self.ran_away = True
                        break
                    left -= 1
                    handle = ready.popleft()
                    if not handle._cancelled:
                        try:
                            handle._run()
                        except SystemExit:
                            continue  # the task stores the exception
        finally:
            sys.set_asyncgen_hooks(*generators)
            asyncio.events._set_running_loop(outer)
            if outer is not None and outer_task is not None:
                asyncio._enter_task(outer, outer_task)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Closes an unfinished asynchronous generator on this loop. By default, asyncio would use the outer loop."""
        self.call_soon(lambda: self.create_task(generator.aclose()))

    def run_soon(self, handle: asyncio.Handle) -> None:
        """Schedules an existing handle, such as the handle of an expired timer, for the next call of `pump`."""
        self._ready.append(handle)

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Schedules a callback, as in any event loop."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedules a callback after a delay, as in any event loop."""
        return self.call_at(self.clock.now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedules a callback for a point in time, as in any event loop."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if self.owner is not None:
            self.owner.set_timer(handle, when - self.clock.now)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if self.owner is not None:
            self.owner.drop_timer(handle)

    def time(self) -> float:
        """Returns the seconds from the start of the agent to the last delivered result."""
        return self.clock.now

    def create_future(self) -> asyncio.Future[Any]:
        """Creates a future, as in any event loop."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Creates a task, as in any event loop."""
        task = asyncio.Task(coro, loop=self, **options)
        self.tasks.add(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """Runs `func` in a thread. A replay calls `func` again, so it must have no side effects. Ignores `executor`."""
        if self.owner is None:
            raise EpisodeStateError("The agent's part of the episode has ended, so no more threads can start.")
        return self.owner.run_in_thread(func, args)

    def is_running(self) -> bool:
        """Returns whether agent code is running."""
        return asyncio.events._get_running_loop() is self

    def is_closed(self) -> bool:
        """Returns `False`, because the loop is never closed."""
        return False

    def close(self) -> None:
        """Does nothing."""

    def get_debug(self) -> bool:
        """Returns `False`, because there is no debug mode."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Has no effect."""

    def get_task_factory(self) -> None:
        """Returns `None`, because there is no task factory."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Passes the context of an exception to the owner."""
        if self.owner is not None:
            self.owner.report(context)

    default_exception_handler = call_exception_handler

    async def shutdown_asyncgens(self) -> None:
        """Does nothing."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Does nothing."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: AgentLoop, *_: object, **__: object) -> NoReturn:
        error = NondeterministicCallError(
            f"The code agent called `{name}` of its event loop, which is not supported. An episode can only be "
            "replayed if all input of its agent comes from the container and the LLM client. If the agent needs other "
            "input, set `deterministic = False` on its factory. Its episodes can then only be restored from a state "
            "that the agent exports (`StatefulAgent`)."
        )
        if self.owner is not None:
            self.owner.note_refusal(error)
        raise error

    return refuse


for _name in sorted(asyncio.AbstractEventLoop.__dict__):
    _theirs = asyncio.AbstractEventLoop.__dict__[_name]
    if not _name.startswith("_") and callable(_theirs) and _name not in AgentLoop.__dict__:
        setattr(AgentLoop, _name, _refusal(_name))
