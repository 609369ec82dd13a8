"""The agent runtime, which runs one agent's coroutine, executes its calls and writes the journal.

A deterministic agent runs on its own `AgentLoop`, and the outer event loop executes its calls. When a call completes,
the runtime records the result in the journal, delivers it to the agent, and runs the agent until it waits again.
`replay` delivers the results from a journal instead.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ares_exp.agents.runtime.agent_loop import AgentLoop
from ares_exp.agents.runtime.journal import Call, CallEntry, CallKind, DoneEntry, Journal, SeedEntry
from ares_exp.agents.runtime.virtual_clock import VirtualClockAndRandom
from ares_exp.errors import EpisodeStateError, JournalError, NondeterministicCallError, SnapshotError
from ares_exp.llms.request import LLMRequest

if TYPE_CHECKING:
    from ares_exp.agents.runtime.replayed_calls import JournalReplay

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
        from ares_exp.agents.runtime.replayed_calls import JournalReplay

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
