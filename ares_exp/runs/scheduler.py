"""The scheduler: a limited number of episodes at once; retries wait outside of a slot."""

from __future__ import annotations

import asyncio
import hashlib
import re
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from ares_exp.trajectories.response_log import LoggedEpisode


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """One planned try of an attempt.

    Attributes:
        episode_id: Unique; usable as a file name.
        task_name: The task.
        attempt: Number of the attempt at the task, from 0.
        seed: Derived from the run's seed, the task's name, the attempt and the try, so that it depends on nothing else.
        retry: Number of earlier tries of the attempt.
        earlier: The try whose responses are given again; `None` for a start from the start.
        use_snapshots: Whether it may continue from a snapshot of the earlier try.
    """

    episode_id: str
    task_name: str
    attempt: int
    seed: int
    retry: int = 0
    earlier: LoggedEpisode | None = field(default=None, repr=False)
    use_snapshots: bool = True

    @property
    def slot(self) -> tuple[str, int]:
        """The attempt: task and number."""
        return self.task_name, self.attempt

    def going_on(self, earlier: LoggedEpisode, *, retry: int, use_snapshots: bool = True) -> Self:
        """Plans a try that continues with the responses of an earlier one and shares its seed."""
        again = self.anew(retry=retry, seed=earlier.seed)
        return replace(again, earlier=earlier, use_snapshots=use_snapshots)

    def anew(self, *, retry: int, seed: int) -> Self:
        """Plans a try that starts from the start, after one that failed or was lost."""
        return replace(self, episode_id=_new_id(*self.slot), seed=seed, retry=retry, earlier=None)


def plan_episodes(task_names: Sequence[str], *, attempts: int, seed: int) -> list[PlannedEpisode]:
    """Plans every task `attempts` times, attempts outermost: an interrupted run has run many tasks at least once."""
    return [plan_attempt(name, attempt, seed=seed) for attempt in range(attempts) for name in task_names]


def plan_attempt(task_name: str, attempt: int, *, seed: int) -> PlannedEpisode:
    """Plans one attempt, with its seed derived from that of the run."""
    return PlannedEpisode(_new_id(task_name, attempt), task_name, attempt, episode_seed(seed, task_name, attempt))


def _new_id(task_name: str, attempt: int) -> str:
    slug = re.sub(r"[^A-Za-z0-9._-]", "-", task_name)[:80]
    return f"{slug}__{attempt}__{uuid.uuid4().hex[:8]}"


def episode_seed(seed: int, task_name: str, attempt: int, retry: int = 0) -> int:
    """Derives a seed in [0, 2**31) that is the same on every machine."""
    name = f"{seed}/{task_name}/{attempt}" + (f"/{retry}" if retry else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


INTERRUPT_GRACE_SEC = 4.5
"""Seconds that interrupted episodes have to clean up before the run ends without them."""


class Retry(NamedTuple):
    """A retry of an attempt, the time when it is due, and whether it goes before those that wait for a slot."""

    planned: PlannedEpisode
    wait_sec: float
    is_first: bool = False


Execute = Callable[[PlannedEpisode], Coroutine[Any, Any, Retry | None]]
_Running = asyncio.Task[Retry | None]


class Scheduler:
    """Runs episodes until all attempts have their results, or until the interrupt.

    Attributes:
        concurrency: Maximum number of episodes at once.
        interrupted: Whether `interrupt` was called.
        holds: Why nothing new starts: a sentence for each cause of a pause, empty for an order.
    """

    def __init__(self, concurrency: int, execute: Execute) -> None:
        """Keeps the arguments.

        Args:
            concurrency: Maximum number of episodes at once.
            execute: Runs one, once `starts` has returned, and returns a retry, if one is due. It raises only errors
                that are to end the run.
        """
        self.concurrency = concurrency
        self._execute = execute
        self._ready: deque[PlannedEpisode] = deque()
        self._waiting: dict[str, tuple[PlannedEpisode, asyncio.TimerHandle]] = {}
        self._running: dict[_Running, PlannedEpisode] = {}
        self._ended: deque[_Running] = deque()
        self._cancelled: set[_Running] = set()
        self._started: set[str] = set()
        self.holds: dict[object, str] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._changed = asyncio.Event()
        self.interrupted = self._waits_for_more = False

    @property
    def running(self) -> int:
        """Number of episodes that have started and have not released everything."""
        return len(self._started)

    @property
    def queued(self) -> int:
        """Number of tries that wait for a slot, for their time, or with a slot for room."""
        return len(self._ready) + len(self._waiting) + len(self._running) - len(self._started)

    def interrupt(self) -> None:
        """Ends running episodes as cancelled and starts no more. A second call changes nothing."""
        if not self.interrupted:
            self.interrupted = True
            self._cancel_all()
            self._changed.set()

    @property
    def paused(self) -> bool:
        """Whether nothing new starts."""
        return bool(self.holds)

    def pause(self, by: object = "order", why: str = "") -> None:
        """Starts nothing new until `resume(by)`. Running episodes continue to their end."""
        self.holds[by] = why
        self._resumed.clear()

    def resume(self, by: object = "order") -> None:
        """Ends a pause. New episodes start if there is no other one."""
        self.holds.pop(by, None)
        if not self.holds:
            self._resumed.set()
            self._changed.set()

    async def starts(self, planned: PlannedEpisode, check: Callable[[], Awaitable[None]] | None = None) -> None:
        """Called by `execute` when there is room for a try. Returns when it may start.

        Args:
            planned: The try.
            check: Awaited before the start, and again after each pause. It may pause the scheduler.
        """
        while True:
            while self.paused:  # it may be paused again before the waiting task runs
                await self._resumed.wait()
            if check is not None:
                await check()
            if not self.paused:
                break
        self._started.add(planned.episode_id)

    def resize(self, concurrency: int) -> None:
        """Changes the maximum number of episodes at once; those above a smaller one end as they would."""
        self.concurrency = concurrency
        self._changed.set()

    def cancel(self, episode_id: str) -> None:
        """Cancels an episode that runs; `execute` decides what becomes of it, which may be nothing."""
        for task, planned in self._running.items():
            if planned.episode_id == episode_id:
                self._cancelled.add(task)
                task.cancel()

    def drop(self, is_unwanted: Callable[[PlannedEpisode], bool]) -> list[PlannedEpisode]:
        """Takes tries that have not started off the queue, those that wait for their time or for room included.

        Returns:
            What was taken off.
        """
        dropped = [one for one in self._ready if is_unwanted(one)]
        self._ready = deque(one for one in self._ready if not is_unwanted(one))
        for planned, timer in list(self._waiting.values()):
            if is_unwanted(planned):
                timer.cancel()
                dropped.append(self._waiting.pop(planned.episode_id)[0])
        for task, planned in self._running.items():
            if is_unwanted(planned) and planned.episode_id not in self._started and task not in self._cancelled:
                self._cancelled.add(task)
                task.cancel()
                dropped.append(planned)
        self._changed.set()
        return dropped

    def append(self, planned: PlannedEpisode) -> None:
        """Puts a try at the end of the queue."""
        self._ready.append(planned)
        self._changed.set()

    def end(self) -> None:
        """Says that nothing more is added: `run` returns when all have their results."""
        self._waits_for_more = False
        self._changed.set()

    async def run(self, owed: Sequence[PlannedEpisode], *, waits_for_more: bool = False) -> None:
        """Runs all of them. After an interrupt returns early, at most `INTERRUPT_GRACE_SEC` later.

        Args:
            owed: What is to be run.
            waits_for_more: Whether it goes on with what is added, until `end`.

        Raises:
            Exception: What `execute` raised.
        """
        self._ready.extend(owed)
        self._waits_for_more = waits_for_more
        try:
            while not self.interrupted and (self._waits_for_more or self._running or self._ready or self._waiting):
                self._start()
                await self._changed.wait()
                self._changed.clear()
                self._settle()
            if self._running:
                await asyncio.wait(self._running, timeout=INTERRUPT_GRACE_SEC)
        finally:
            for _, timer in self._waiting.values():
                timer.cancel()
            if not self.interrupted:
                self._cancel_all()
                if self._running:
                    await asyncio.wait(self._running, timeout=INTERRUPT_GRACE_SEC)

    def _start(self) -> None:
        while self._ready and not self.paused and len(self._running) < self.concurrency:
            planned = self._ready.popleft()
            task = asyncio.create_task(self._execute(planned))
            self._running[task] = planned
            task.add_done_callback(self._end)

    def _end(self, task: _Running) -> None:
        self._ended.append(task)
        self._changed.set()

    def _settle(self) -> None:
        """Frees the slots of episodes that have ended; their retries wait."""
        while self._ended:
            task = self._ended.popleft()
            self._started.discard(self._running.pop(task).episode_id)
            is_ordered = self.interrupted or task in self._cancelled
            self._cancelled.discard(task)
            if not (task.cancelled() and is_ordered) and (retry := task.result()) is not None:
                self._wait(retry)

    def _wait(self, retry: Retry) -> None:
        def ready() -> None:
            self._waiting.pop(retry.planned.episode_id)
            put = self._ready.appendleft if retry.is_first else self._ready.append
            put(retry.planned)
            self._changed.set()

        timer = asyncio.get_running_loop().call_later(retry.wait_sec, ready)
        self._waiting[retry.planned.episode_id] = retry.planned, timer

    def _cancel_all(self) -> None:
        for task in self._running:
            task.cancel()
