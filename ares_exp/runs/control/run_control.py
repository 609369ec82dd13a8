"""The control of a run by files: the run applies and records order files, and writes its state to `status.json`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ares_exp.cancellation import finish
from ares_exp.errors import ConfigError, UserError
from ares_exp.policies.waiting import Gate
from ares_exp.records.run_dir import STOP, RunDir, append_lines
from ares_exp.records.terminal_text import count_of, first_of, format_duration, one_line
from ares_exp.runs.control.orders import Inbox, Order, OrderFile
from ares_exp.runs.control.status import Held, LiveStatus, State, write_status
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import Scheduler

LOOK_SEC = 1.0
"""Interval between two checks for new order files, in seconds."""
WRITE_SEC, WATCHED_WRITE_SEC = 10.0, 2.0
"""Intervals between two writes of `status.json`, in seconds: by default, and while another process reads the file."""
UNWIND_SEC = 2.0
MAX_ROUNDS = 100
SHOWN_FILES, SHOWN_EPISODES = 3, 10

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RunControl:
    """Applies orders to a run and writes its `status.json`.

    Attributes:
        sweep_dir: Folder of the sweep, whose orders apply to all of its jobs; `None` if there is no sweep.
        set: Function that sets config keys to new values (a mapping). If one value is invalid, it changes nothing.
        interrupt: Function that ends the run, like Ctrl-C.
        note: Function that is called with each line of `control.jsonl`.
        is_recorded: Function that returns whether the run can still write its records. If it cannot, this was
            already reported, and failures to write `status.json` are not logged as warnings.
    """

    run_dir: RunDir
    scheduler: Scheduler
    gate: Gate
    live: LiveStatus
    set: Callable[[Mapping[str, Any]], None]
    interrupt: Callable[[], None]
    running: Callable[[], Sequence[RunningEpisode]]
    note: Callable[[Mapping[str, Any]], None]
    sweep_dir: Path | None
    is_recorded: Callable[[], bool]
    _own: Inbox = field(init=False)
    _inboxes: Sequence[Inbox] = field(init=False)
    _resuming: asyncio.TimerHandle | None = field(init=False, default=None)
    _written_at: float = field(init=False, default=0.0)
    _written: State | None = field(init=False, default=None)
    _is_stopped: bool = field(init=False, default=False)
    _has_failed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._own = Inbox(self.run_dir.control)
        sweeps = [] if self.sweep_dir is None else [self.sweep_dir / self.run_dir.control.name]
        self._inboxes = [self._own, *(Inbox(folder, is_shared=True) for folder in sweeps)]

    @asynccontextmanager
    async def applied(self) -> AsyncIterator[None]:
        """Applies orders and writes `status.json` during the block."""
        await self._refuse_all("it was sent before this session of the run started")
        await self._look()
        await self._write_status()
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            self._forget_timer()
            await finish(self._end(watching))

    async def _end(self, watching: asyncio.Task[None]) -> None:
        await asyncio.wait({watching}, timeout=UNWIND_SEC)
        await self._refuse_all("the run has ended")
        await self._write_status()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SEC)
            look = asyncio.create_task(self._look())
            try:
                has_changed = await asyncio.shield(look) or self.live.state != self._written
            finally:
                await asyncio.wait({look}, timeout=UNWIND_SEC)  # an order that was read must also be applied
            is_watched = await asyncio.to_thread(lambda: self._own.is_watched)
            interval_sec = WATCHED_WRITE_SEC if is_watched else WRITE_SEC
            if has_changed or time.monotonic() - self._written_at >= interval_sec - LOOK_SEC / 2:
                await self._write_status()

    async def _look(self) -> bool:
        """Reads new order files and applies them. Returns whether there were any files."""

        def take() -> tuple[list[OrderFile], bool]:
            found = [file for inbox in self._inboxes for file in inbox.take()]
            return found, self.sweep_dir is not None and (self.sweep_dir / STOP).exists()

        found, is_over = await asyncio.to_thread(take)
        if is_over and not self._is_stopped:
            self._is_stopped = True
            found.append(OrderFile(STOP, replace(Order.new("stop"), by=f"the file {STOP} of the sweep")))
        await self._reject([one for one in found if one.order is None])
        for one in found:
            if one.order is not None:
                await self._settle(one.order, one.uid)
        return bool(found)

    async def _settle(self, order: Order, uid: int | None) -> None:
        why = f", because: {one_line(order.reason)}" if order.reason else ""
        logger.warning("Received a command from %s: %s%s.", one_line(order.by), order, why)
        try:
            outcome, says = "done", self._apply(order)
        except UserError as error:
            outcome, says = "refused", str(error)
        except Exception as error:
            outcome, says = "failed", f"{type(error).__name__}: {error}"
        if outcome != "done":
            logger.warning("The command was %s: %s", outcome, one_line(says, 300))
        await self._record(order.settled(outcome, says, uid=uid))

    def _apply(self, order: Order) -> str:
        """Applies an order, and describes the result in a sentence. If it raises `UserError`, nothing has changed."""
        match order.verb:
            case "pause":
                return self._pause(order)
            case "resume":
                return self._resume()
            case "cancel":
                return self._cancel(str(order.what))
            case "set":
                self.set(order.values)
                shown = (f"{key}={'null' if value is None else value}" for key, value in order.values.items())
                return f"The run now uses {', '.join(shown)}."
            case "stop":
                self.interrupt()
                return "Running episodes are being cancelled. You can resume the run."

    def _pause(self, order: Order) -> str:
        now = time.time()
        until = min(now, order.at) + order.for_sec if order.for_sec is not None else None
        if until is not None and until <= now:
            return "The run was not paused, because the time of the pause is already over."
        self._forget_timer()
        self.scheduler.pause()
        (self.gate.close if order.now else self.gate.open)()
        since = self.live.held.since if self.live.held is not None else now
        self.live.held = Held(since, order.now, until, order.by, order.reason)
        if until is not None:
            self._resuming = asyncio.get_running_loop().call_later(until - now, self._end_pause)
        running = count_of(len(self.running()), "running episode")
        how = f"{running} will wait at the next request" if order.now else f"{running} will continue"
        return f"No new episode starts, and {how}."

    def _resume(self) -> str:
        held = self.live.held
        if held is None:
            return f"No command has paused the run. {self.live.outage}".rstrip()
        self._end_pause()
        return f"Resumed after {format_duration(time.time() - held.since)}."

    def _cancel(self, what: str) -> str:
        dropped = self.scheduler.drop(lambda one: what in (one.episode_id, one.task_name))
        running = self.running()
        found = [one for one in running if what in (one.planned.episode_id, one.planned.task_name)]
        if not found and not dropped:
            names = [one.planned.episode_id for one in running]
            shown = first_of(names, SHOWN_EPISODES) or "none"
            raise ConfigError(f"No running or queued episode has the id or task name {what}. Running: {shown}.")
        for episode in found:
            self.scheduler.cancel(episode.planned.slot)
        queued = f", and {count_of(len(dropped), 'attempt')} removed from the queue" if dropped else ""
        return f"{count_of(len(found), 'episode')} cancelled{queued}. `resume=` runs the attempts without a reward."

    def _end_pause(self) -> None:
        self._forget_timer()
        self.live.held = None
        self.gate.open()
        self.scheduler.resume()

    def _forget_timer(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None

    async def _reject(self, files: Sequence[OrderFile]) -> None:
        if not files:
            return
        named = "; ".join(f"{one_line(one.name, 60)} ({one_line(one.problem)})" for one in files[:SHOWN_FILES])
        more = f"; and {len(files) - SHOWN_FILES:,} more" if len(files) > SHOWN_FILES else ""
        says = f"Ignored {count_of(len(files), 'invalid file')} in {self.run_dir.control.name}/: {named}{more}."
        logger.warning("%s", says)
        await self._record({"verb": None, "outcome": "refused", "says": says, "settled_at": time.time()})

    async def _refuse_all(self, why: str) -> None:
        for _ in range(MAX_ROUNDS):  # another process may still be writing
            if not (found := await asyncio.to_thread(self._own.take)):
                return
            await self._reject([one for one in found if one.order is None])
            for one in found:
                if one.order is not None:
                    await self._record(one.order.settled("refused", why, uid=one.uid))

    async def _record(self, line: Mapping[str, Any]) -> None:
        self.note(line)
        await finish(self._on_disk(lambda: append_lines(self.run_dir.orders, line)))

    async def _write_status(self) -> None:
        self._written, self._written_at = self.live.state, time.monotonic()
        await self._on_disk(lambda: write_status(self.run_dir.status, self.live.read()))

    async def _on_disk(self, write: Callable[[], None]) -> None:
        """Calls `write` in a thread. If it fails, the run continues. Only the first failure is logged as a warning."""
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            level = logging.DEBUG if self._has_failed or not self.is_recorded() else logging.WARNING
            self._has_failed = True
            logger.log(level, "The state of the run cannot be written: %s: %s", error.filename, error.strerror)
