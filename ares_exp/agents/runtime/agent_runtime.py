"""The agent runtime, which runs one agent's coroutine, executes its calls and writes the journal.

A deterministic agent runs on its own `AgentLoop`, a small event loop without sockets, and the outer event loop executes
its calls. When a call completes, the runtime records the result in the journal, delivers it to the agent, and calls
`pump`, which runs callbacks until none is ready. `replay` delivers the results from a journal instead. If it delivers
the same results in the same order, the agent makes the same calls again.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import contextvars
import functools
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from ares_exp.agents.runtime.journal import Call, CallEntry, CallKind, DoneEntry, Journal, JournalReplay, SeedEntry
from ares_exp.agents.runtime.virtual_clock import VirtualClockAndRandom
from ares_exp.errors import EpisodeStateError, JournalError, NondeterministicCallError, SnapshotError
from ares_exp.llms.request import LLMRequest

AgentStart = Callable[[], Coroutine[Any, Any, None]]
"""Function that returns the coroutine of an agent."""


class AgentRuntime:
    """The runtime of one agent, which executes its calls and records them in the journal.

    Attributes:
        journal: Events so far; `None` for an agent that is not deterministic.
        task: Main task of the agent; `None` before the start.
        refused: Error for the agent's first unsupported event loop operation; `None` if there was none.
    """

    def __init__(
        self,
        journal: Journal | None,
        *,
        on_llm: Callable[[Call], None],
        on_change: Callable[[], None],
    ) -> None:
        """Prepares the agent's event loop.

        Args:
            journal: Empty journal to write to, or the recorded journal for `replay`. `None` if the agent needs an
                ordinary event loop and therefore cannot be replayed.
            on_llm: Function that is called with each LLM call. The agent waits until `deliver` is called with the
                response.
            on_change: Function that is called each time the agent may have run or ended.
        """
        self.journal = journal
        self.task: asyncio.Task[None] | None = None
        self.refused: NondeterministicCallError | None = None
        self._outer = asyncio.get_running_loop()
        self._agent_loop: AgentLoop | None = None
        if journal is not None:
            clock = VirtualClockAndRandom(seed=journal.seed, started_at=journal.started_at)
            self._agent_loop = AgentLoop(self, clock)  # type: ignore[abstract]  # the rest is rejected
        self._on_llm = on_llm
        self._on_change = on_change
        self._open: dict[int, Call] = {}
        self._timers: dict[int, Call] = {}
        self._new: list[Call] = []
        self._next_id = 0
        self._replay: JournalReplay | None = None
        self._made_again: dict[int, Any] = {}
        self._held: list[Callable[[], None]] | None = None
        self._closed = False
        self._ran: asyncio.Future[None] | None = None
        self._works: set[asyncio.Task[Any]] = set()
        self._started = self._outer.time()

    @property
    def elapsed_sec(self) -> float:
        """Seconds since the agent started, without the time for which it was stored in a snapshot."""
        return self._outer.time() - self._started

    @property
    def in_flight(self) -> list[Call]:
        """The calls that are being executed, except timers and LLM calls."""
        return [call for call in self._open.values() if call.kind not in ("llm", "timer")]

    @property
    def open_calls(self) -> list[int]:
        """Sorted numbers of the calls for which the agent waits."""
        return sorted(self._open)

    @property
    def blocked(self) -> str | None:
        """Sentence that explains why the agent is stuck; `None` if it is not stuck, or if it has ended.

        An agent is stuck if it waits for none of its calls, or if it keeps running without making a call.
        """
        if self._agent_loop is None or (self.task is not None and self.task.done()):
            return None
        if self._agent_loop.ran_away:
            return "The code agent was stopped, because it kept running and never waited for its LLM or its container."
        if self._open or self.task is None:
            return None
        return str(self.refused or "The code agent waits for something other than its LLM or its container.")

    @property
    def has_ended(self) -> bool:
        """Whether the agent has returned, raised or been cancelled, or was never started."""
        return self.task is None or self.task.done()

    def start(self, agent: AgentStart, *, elapsed_sec: float = 0.0) -> None:
        """Starts the agent, and runs it until it waits. The property `elapsed_sec` starts at the given value."""
        self._started = self._outer.time() - elapsed_sec
        self._start(agent)
        self._pump()
        self._dispatch()

    async def call(
        self,
        kind: CallKind,
        arguments: Any,
        perform: Callable[[], Awaitable[Any]] | None = None,
        again: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Executes a `Call` and returns its value. Raises `EpisodeStateError` if the agent phase has ended."""
        if self._closed:
            await asyncio.sleep(0)  # yields, so that a loop of calls does not block other tasks
            raise EpisodeStateError(f"The agent's part of the episode has ended, so no more {kind} calls are allowed.")
        call = self._ask(kind, arguments, perform, again)
        assert call.future is not None
        try:
            return await call.future
        except asyncio.CancelledError:
            self._give_up(call)
            raise

    def reseed(self, seed: int) -> None:
        """Reseeds the random generators of the agent, and records the new seed in the journal."""
        if self.journal is not None and self._agent_loop is not None:
            self.journal.entries.append(SeedEntry(seed))
            self._agent_loop.clock.reseed(seed)

    def hold(self) -> None:
        """Defers results and new calls until `release`, so that the agent and the journal do not change meanwhile."""
        self._held = []

    def release(self) -> None:
        """Delivers the results and executes the calls that `hold` has deferred."""
        held, self._held = self._held or [], None
        for deliver in held:
            self._outer.call_soon(deliver)
        if self._new:
            self._outer.call_soon(self._dispatch)

    async def cancel(self, grace_sec: float) -> None:
        """Rejects new calls, cancels the agent, and waits up to `grace_sec` for the end of the agent and its calls."""
        self._closed = True
        self.release()
        for task in list(self._agent_loop.tasks) if self._agent_loop is not None else [self.task]:
            if task is not None:
                task.cancel()
        self._pump()
        self._dispatch()
        deadline = self._outer.time() + grace_sec
        while (left := deadline - self._outer.time()) > 0:
            self._works = {work for work in self._works if not work.done()}  # unstarted tasks stay in the set
            if not self._works and (self.has_ended or self.blocked is not None):
                break
            self._ran = self._outer.create_future()
            await asyncio.wait({self._ran, *self._works}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for call in self._open.values():
            if isinstance(call.work, asyncio.TimerHandle):
                call.work.cancel()
        if self.task is not None and self.task.done() and not self.task.cancelled():
            self.task.exception()  # marks it as retrieved, so that asyncio does not log it
        if self.has_ended and not self._works:
            # Breaks reference cycles, so that the episode is freed without the garbage collector.
            self._on_llm, self._on_change = lambda _: None, lambda: None
            if self._agent_loop is not None:
                self._agent_loop.owner = None

    def replay(
        self, agent: AgentStart, *, elapsed_sec: float, originals: Mapping[int, LLMRequest] | None = None
    ) -> None:
        """Starts the agent, and delivers the results that are recorded in the journal.

        No call is executed during the replay. After the last recorded result, the agent continues normally.

        Args:
            agent: Function that returns the agent's coroutine.
            elapsed_sec: Value of `elapsed_sec` when the journal ended.
            originals: Recorded requests by call number, to quote them in errors.

        Raises:
            DivergenceError: The agent does not make the recorded calls.
            JournalError: The journal cannot be replayed.
        """
        self._rerun(agent, originals)
        self._started = self._outer.time() - elapsed_sec
        self._new = sorted(self._open.values(), key=lambda call: call.call_id)
        if busy := self.in_flight:
            raise JournalError(
                f"The agent's journal is incomplete: the result of the `{busy[0].kind}` call is missing."
            )
        self._dispatch()

    def rerun_finished_stage(self, agent: AgentStart) -> None:
        """Replays an agent that has finished its stage of the task.

        A journal from disk has only digests of LLM requests. The replay replaces them by the complete requests. The
        caller has to cancel the runtime afterwards.

        Raises:
            JournalError: The journal cannot be replayed, or the agent does not make the recorded calls.
        """
        self.hold()
        self._rerun(agent, None)

    def _rerun(self, agent: AgentStart, originals: Mapping[int, LLMRequest] | None) -> None:
        assert self.journal is not None
        assert self._agent_loop is not None
        replay = self._replay = JournalReplay(self.journal.entries, originals)
        self._start(agent)
        self._pump()
        while (entry := replay.next_event(finished=self.has_ended)) is not None:
            if isinstance(entry, SeedEntry):
                self._agent_loop.clock.reseed(entry.seed)
                continue
            if (call := self._open.pop(entry.call_id, None)) is None:
                raise replay.given_up(entry)
            call.is_open = False
            self._agent_loop.clock.now = entry.at
            self._complete(call, *_recorded_outcome(call, entry))
            self._pump()
        for place, made in enumerate(self.journal.entries):
            if isinstance(made, CallEntry) and made.call_id in self._made_again:
                self.journal.entries[place] = replace(made, arguments=self._made_again[made.call_id])
        self._made_again.clear()
        self._next_id = replay.last_call + 1
        self._replay = None

    def _start(self, agent: AgentStart) -> None:
        if self._agent_loop is not None:
            self._agent_loop.call_soon(self._make_task, agent)
        else:
            self._make_task(agent)

    def _make_task(self, agent: AgentStart) -> None:
        self.task = (self._agent_loop or self._outer).create_task(agent(), name="code agent")
        self.task.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        self._has_run()
        self._on_change()

    def _pump(self) -> None:
        if self._agent_loop is not None:
            self._agent_loop.pump()
        if self._ran is not None:
            self._has_run()

    def _has_run(self) -> None:
        """Wakes `cancel`, which waits until the agent has run or ended."""
        if self._ran is not None and not self._ran.done():
            self._ran.set_result(None)

    def _ask(
        self,
        kind: CallKind,
        arguments: Any,
        perform: Callable[[], Awaitable[Any]] | None = None,
        again: Callable[[Any], Any] | None = None,
    ) -> Call:
        """Adds a call to the journal. In a replay, finds the call in the journal instead.

        If a replayed agent makes a call that is not in the journal, the call never completes, so the agent cannot
        continue.
        """
        future = None if kind == "timer" else (self._agent_loop or self._outer).create_future()
        call_id = self._next_id if self._replay is None else self._replay.match(kind, arguments)
        call = Call(-1 if call_id is None else call_id, kind, arguments, perform, again, future)
        if call_id is None:
            return call
        if self._replay is not None:
            self._made_again[call_id] = arguments
        else:
            self._next_id += 1
            if self.journal is not None:
                self.journal.entries.append(CallEntry(call_id, kind, arguments))
            else:
                self._outer.call_soon(self._dispatch)
        call.is_open = True
        self._open[call.call_id] = call
        self._new.append(call)
        return call

    def _dispatch(self) -> None:
        """Starts to execute the new calls, unless they are held or replayed. In any case, calls `on_change`."""
        if self._new and self._replay is None and self._held is None:
            new, self._new = self._new, []
            for call in new:
                if not call.is_open:
                    continue
                if call.kind == "llm":
                    self._on_llm(call)
                elif call.perform is not None:
                    call.work = self._outer.create_task(self._work(call, call.perform))
                    self._works.add(call.work)
                elif call.handle is not None:
                    left = call.handle.when() - self.elapsed_sec
                    call.work = self._outer.call_later(max(0.0, left), self.deliver, call, None)
        self._on_change()

    async def _work(self, call: Call, perform: Callable[[], Awaitable[Any]]) -> None:
        try:
            value = await perform()
        except asyncio.CancelledError:
            if (work := asyncio.current_task()) is not None and not work.cancelling():  # the agent did not cancel it
                self.deliver(call, None, RuntimeError(f"the {call.kind} was cancelled"))
            raise
        except (Exception, SystemExit) as error:
            self.deliver(call, None, _for_the_agent(error))
        else:
            self.deliver(call, value)
        finally:
            assert isinstance(call.work, asyncio.Task)
            self._works.discard(call.work)

    def deliver(self, call: Call, value: Any, error: BaseException | None = None) -> None:
        """Records the result of a call, and runs the agent with it. Ignores the result of a call that was cancelled."""
        if self._held is not None:
            self._held.append(functools.partial(self.deliver, call, value, error))
            return
        if self._open.pop(call.call_id, None) is None:
            return
        call.is_open = False
        if self.journal is not None and self._agent_loop is not None:
            clock = self._agent_loop.clock
            clock.now = round(max(clock.now, self._outer.time() - self._started), 6)
            # Replays run the function of a thread again, so its result need not be JSON-ready.
            outcome = () if call.kind == "thread" else (value, error)
            self.journal.entries.append(DoneEntry(call.call_id, clock.now, *outcome))
        self._complete(call, value, error)
        self._pump()
        self._dispatch()

    def _complete(self, call: Call, value: Any, error: BaseException | None) -> None:
        """Sets the result of a call for the agent, which continues with the next `pump`."""
        if call.handle is not None:
            assert self._agent_loop is not None
            self._timers.pop(id(call.handle), None)
            self._agent_loop.run_soon(call.handle)
        elif call.future is None or call.future.done():
            return
        elif error is None:
            call.future.set_result(value)
        else:
            call.future.set_exception(error)

    def _give_up(self, call: Call) -> None:
        """Cancels the execution of a call that the agent no longer waits for."""
        if self._open.pop(call.call_id, None) is None:
            return
        call.is_open = False
        if call.work is not None:
            call.work.cancel()

    def set_timer(self, handle: asyncio.TimerHandle, delay: float) -> None:
        """Records a timer as a call. After `delay` seconds, the agent loop runs `handle`."""
        call = self._ask("timer", round(delay, 6))
        call.handle = handle
        self._timers[id(handle)] = call

    def drop_timer(self, handle: asyncio.TimerHandle) -> None:
        """Removes a cancelled timer."""
        call = self._timers.pop(id(handle), None)
        if call is not None:
            self._give_up(call)

    def run_in_thread(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Runs a function in a thread. Returns a future of the agent's loop.

        The journal records only that the function has ended. A replay therefore calls the function again at this point.
        """
        perform = functools.partial(asyncio.to_thread, function, *arguments)
        call = self._ask("thread", _name_of(function), perform, lambda _: function(*arguments))
        assert call.future is not None
        call.future.add_done_callback(lambda future: self._give_up(call) if future.cancelled() else None)
        return call.future

    def report(self, context: dict[str, Any]) -> None:
        """Passes an unhandled exception of the agent's tasks to the outer loop, unless the agent was cancelled."""
        if not self._closed:
            self._outer.call_exception_handler(context)

    def note_refusal(self, error: NondeterministicCallError) -> None:
        """Stores the error with which the loop rejected an operation. Can be called from any thread."""
        self.refused = self.refused or error
        self._outer.call_soon_threadsafe(self._on_change)


def _recorded_outcome(call: Call, done: DoneEntry) -> tuple[Any, BaseException | None]:
    if call.again is None or done.error is not None:
        return done.value, done.error
    try:
        return call.again(done.value), None
    except SnapshotError:
        raise
    except (Exception, SystemExit) as error:
        return None, _for_the_agent(error)


def _for_the_agent(error: BaseException) -> BaseException:
    """Returns the exception to raise in the agent. A `SystemExit` would end the run, so it becomes a `RuntimeError`."""
    return RuntimeError(f"sys.exit({error.code!r})") if isinstance(error, SystemExit) else error


def _name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function. Unwraps `partial(context.run, function)`, which `asyncio.to_thread` creates."""
    wrapped = next(iter(getattr(function, "args", ())), None)
    named = wrapped if callable(wrapped) else function
    return str(getattr(named, "__qualname__", type(named).__name__))


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
