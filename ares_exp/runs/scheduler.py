"""The scheduler, which decides when each episode of a run starts, and limits how many run at the same time.

In an outage, no episode starts: a container engine, container service or endpoint is unreachable.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import UnreachableError
from ares_exp.policies.policy import Check
from ares_exp.records.terminal_text import format_duration
from ares_exp.trajectories.response_log import LoggedEpisode

logger = logging.getLogger(__name__)

Slot = tuple[str, int]
"""Name of a task and number of an attempt at it, which identify the attempt."""


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """The plan of one episode. Each attempt at a task has one episode, and one more for each retry.

    Attributes:
        episode_id: Unique id, which can be used as a file name.
        task_name: Name of the task.
        attempt: Number of the attempt at the task, from 0.
        seed: Seed of the episode, which depends only on the run's seed, the task's name, the attempt and the retry.
        retry: Number of earlier episodes of the same attempt.
        earlier: Log of the earlier episode whose responses are replayed; `None` to start from the beginning.
        use_snapshots: Whether the episode may continue from a snapshot of the earlier episode.
        limits: Limits of this episode; `None` for the limits of the run.
    """

    episode_id: str
    task_name: str
    attempt: int
    seed: int
    retry: int = 0
    earlier: LoggedEpisode | None = field(default=None, repr=False)
    use_snapshots: bool = True
    limits: EpisodeLimits | None = None

    @property
    def slot(self) -> Slot:
        """The name of the task and the number of the attempt, which identify the attempt."""
        return self.task_name, self.attempt

    def going_on(self, earlier: LoggedEpisode, *, retry: int, use_snapshots: bool = True) -> Self:
        """Plans another episode of this attempt, which replays the responses of `earlier` and has the same seed."""
        again = self.anew(retry=retry, seed=earlier.seed)
        return replace(again, earlier=earlier, use_snapshots=use_snapshots)

    def anew(self, *, retry: int, seed: int) -> Self:
        """Plans another episode of this attempt, which starts from the beginning after a failed or lost episode."""
        return replace(self, episode_id=_new_id(*self.slot), seed=seed, retry=retry, earlier=None)


def plan_episodes(task_names: Sequence[str], *, attempts: int, seed: int) -> list[PlannedEpisode]:
    """Plans `attempts` attempts at every task: first the first attempts at all tasks, then the second attempts, etc."""
    return [plan_attempt(name, attempt, seed=seed) for attempt in range(attempts) for name in task_names]


def plan_attempt(task_name: str, attempt: int, *, seed: int) -> PlannedEpisode:
    """Plans the first episode of an attempt. Its seed is derived from the run's `seed`."""
    return PlannedEpisode(_new_id(task_name, attempt), task_name, attempt, episode_seed(seed, task_name, attempt))


def _new_id(task_name: str, attempt: int) -> str:
    slug = re.sub(r"[^A-Za-z0-9._-]", "-", task_name)[:80]
    return f"{slug}__{attempt}__{uuid.uuid4().hex[:8]}"


def episode_seed(seed: int, task_name: str, attempt: int, retry: int = 0) -> int:
    """Derives an episode's seed in [0, 2**31) from the run's `seed`. It is the same on every machine."""
    name = f"{seed}/{task_name}/{attempt}" + (f"/{retry}" if retry else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


INTERRUPT_GRACE_SEC = 4.5
"""Maximum time, in seconds, that an interrupted run waits until its episodes have released their resources."""


class Retry(NamedTuple):
    """A planned retry of an attempt. It is added to the queue after `wait_sec` seconds.

    During this time, it does not use a slot. If `is_first` is set, it is added to the front of the queue.
    """

    planned: PlannedEpisode
    wait_sec: float
    is_first: bool = False


Execute = Callable[[PlannedEpisode], Coroutine[Any, Any, Retry | None]]
_Running = asyncio.Task[Retry | None]


class Scheduler:
    """Runs planned episodes until all attempts have results, or until `interrupt` is called.

    Attributes:
        concurrency: Maximum number of concurrent episodes.
        interrupted: Whether `interrupt` was called.
        cancelled: Attempts whose current episode was cancelled by `cancel` or `drop` and has not ended yet.
        on_drop: Function that is called with the slot of each episode that `cancel` or `drop` ended before `execute`
            could handle the cancellation.
        holds: Reasons for the current pauses, by the object that requested the pause. The reason of a user's pause is
            empty.
    """

    def __init__(self, concurrency: int, execute: Execute) -> None:
        """Creates a scheduler that calls `execute` for each episode.

        `execute` must await `starts` before it runs the episode. It returns a retry if the attempt needs one, and only
        raises errors that end the run.
        """
        self.concurrency = concurrency
        self._execute = execute
        self._ready: deque[PlannedEpisode] = deque()
        self._waiting: dict[str, tuple[PlannedEpisode, asyncio.TimerHandle]] = {}
        self._running: dict[_Running, PlannedEpisode] = {}
        self._ended: deque[_Running] = deque()
        self.cancelled: set[Slot] = set()
        self._started: set[str] = set()
        self.on_drop: Callable[[Slot], None] = lambda _: None
        self.holds: dict[object, str] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._changed = asyncio.Event()
        self.interrupted = self._waits_for_more = False

    @property
    def running(self) -> int:
        """The number of episodes that have started and still use resources."""
        return len(self._started)

    @property
    def queued(self) -> int:
        """The number of episodes that wait for a slot, for the delay before a retry, or for room in the executor."""
        return len(self._ready) + len(self._waiting) + len(self._running) - len(self._started)

    def interrupt(self) -> None:
        """Cancels running episodes and starts no further episodes. Idempotent."""
        if not self.interrupted:
            self.interrupted = True
            self._cancel_all()
            self._changed.set()

    @property
    def paused(self) -> bool:
        """Whether the start of new episodes is paused."""
        return bool(self.holds)

    def pause(self, by: object = "order", why: str = "") -> None:
        """Prevents the start of new episodes until `resume` is called with the same `by`. Running episodes continue."""
        self.holds[by] = why
        self._resumed.clear()

    def resume(self, by: object = "order") -> None:
        """Ends the pause of `by`. New episodes start if there is no other pause."""
        self.holds.pop(by, None)
        if not self.holds:
            self._resumed.set()
            self._changed.set()

    async def starts(self, planned: PlannedEpisode, check: Callable[[], Awaitable[None]] | None = None) -> None:
        """Waits until an episode may start. `execute` calls this method when the executor has room for the episode.

        `check` is awaited before the start and after each pause. It can pause the scheduler, which delays the start.
        """
        while True:
            while self.paused:  # a new pause may start before the waiting task runs
                await self._resumed.wait()
            if check is not None:
                await check()
            if not self.paused:
                break
        self._started.add(planned.episode_id)

    def resize(self, concurrency: int) -> None:
        """Changes the maximum number of concurrent episodes. Running episodes are not cancelled."""
        self.concurrency = concurrency
        self._changed.set()

    def cancel(self, slot: Slot) -> bool:
        """Cancels the asyncio task of an attempt's episode. `execute` handles the cancellation and records the episode.

        Returns false if the attempt has no running task, for example because it is in the queue.
        """
        for task, planned in self._running.items():
            if planned.slot == slot and not task.done():
                self.cancelled.add(slot)
                task.cancel()
                return True
        return False

    def drop(self, is_unwanted: Callable[[PlannedEpisode], bool]) -> list[PlannedEpisode]:
        """Removes and returns the episodes that have not started and for which `is_unwanted` returns true.

        These include episodes that wait for a retry's delay or for room in the executor.
        """
        dropped = [one for one in self._ready if is_unwanted(one)]
        self._ready = deque(one for one in self._ready if not is_unwanted(one))
        for planned, timer in list(self._waiting.values()):
            if is_unwanted(planned):
                timer.cancel()
                dropped.append(self._waiting.pop(planned.episode_id)[0])
        for planned in self._running.values():
            has_started = planned.episode_id in self._started or planned.slot in self.cancelled
            if is_unwanted(planned) and not has_started and self.cancel(planned.slot):
                dropped.append(planned)
        self._changed.set()
        for planned in dropped:
            self.on_drop(planned.slot)
        return dropped

    def append(self, planned: PlannedEpisode) -> None:
        """Adds an episode to the end of the queue."""
        self._ready.append(planned)
        self._changed.set()

    def end(self) -> None:
        """Announces that no more episodes will be added, so that `run` returns when all attempts have results."""
        self._waits_for_more = False
        self._changed.set()

    async def run(self, owed: Sequence[PlannedEpisode], *, waits_for_more: bool = False) -> None:
        """Runs all planned episodes. With `waits_for_more`, also runs episodes that are added before `end` is called.

        After an interrupt, returns within `INTERRUPT_GRACE_SEC`.

        Raises:
            Exception: The error that `execute` raised.
        """
        self._ready.extend(owed)
        self._waits_for_more = waits_for_more
        try:
            while not self.interrupted and (self._waits_for_more or self._running or self._ready or self._waiting):
                self._start()
                await self._changed.wait()
                self._changed.clear()
                self._settle()
        finally:
            for _, timer in self._waiting.values():
                timer.cancel()
            if not self.interrupted:
                self._cancel_all()
            if self._running:
                await asyncio.wait(self._running, timeout=INTERRUPT_GRACE_SEC)
            for task in self._ended:
                if task.cancelled() and (slot := self._running[task].slot) in self.cancelled:
                    self.on_drop(slot)

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
        """Frees the slots of episodes that have ended, and schedules their retries."""
        while self._ended:
            task = self._ended.popleft()
            planned = self._running.pop(task)
            self._started.discard(planned.episode_id)
            is_dropped = task.cancelled() and planned.slot in self.cancelled
            self.cancelled.discard(planned.slot)
            if is_dropped:
                self.on_drop(planned.slot)
            elif not (task.cancelled() and self.interrupted) and (retry := task.result()) is not None:
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


MAX_OUTAGE_SEC = 300.0
"""Duration of an outage, in seconds, after which the run ends."""
FIRST_WAIT_SEC, MAX_WAIT_SEC = 1.0, 10.0
"""First and maximum wait before a failed check is repeated, in seconds. The wait doubles after each further failure."""
CHECK_SEC = 30.0
"""Time limit of one check, in seconds."""


class Outages:
    """Prevents the start of episodes while a service is unreachable. Ends the run after `MAX_OUTAGE_SEC`.

    A check is an async function that raises `UnreachableError` if its service cannot be reached. If several callers
    wait for the same check, it is called only once for all of them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        end: Callable[[UnreachableError], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._scheduler = scheduler
        self._end = end
        self._clock = clock
        self._sleep = sleep
        self._watches: dict[Check, asyncio.Task[None]] = {}

    async def wait(self, check: Check) -> bool:
        """Waits until a check passes. Returns true if there was an outage, which means that the check failed at first.

        Raises:
            UnreachableError: The check failed for `MAX_OUTAGE_SEC`. The run ends.
        """
        if check not in self._watches:
            if (problem := await _problem(check)) is None:
                return False
            if check not in self._watches:
                self._watches[check] = watch = asyncio.create_task(self._watch(check, str(problem)))
                watch.add_done_callback(lambda done: done.cancelled() or done.exception())  # waiters may be cancelled
        await asyncio.shield(self._watches[check])
        return True

    def close(self) -> None:
        """Stops all repeated checks. Idempotent."""
        for watch in self._watches.values():
            watch.cancel()

    async def _watch(self, check: Check, why: str) -> None:
        self._scheduler.pause(check, why)
        longest = format_duration(MAX_OUTAGE_SEC)
        logger.warning(
            "%s No episode starts until it responds. The run ends after %s without a response.", why, longest
        )
        since, wait_sec = self._clock(), FIRST_WAIT_SEC
        while (left_sec := since + MAX_OUTAGE_SEC - self._clock()) > 0:
            await self._sleep(min(wait_sec, left_sec))
            wait_sec = min(2 * wait_sec, MAX_WAIT_SEC)
            if await _problem(check) is None:
                logger.warning(
                    "New episodes start again after an outage of %s. (%s)", format_duration(self._clock() - since), why
                )
                del self._watches[check]
                self._scheduler.resume(check)
                return
        failure = UnreachableError(f"{why} It did not respond for {longest}.")
        self._end(failure)
        raise failure


async def _problem(check: Check) -> UnreachableError | None:
    """Runs a check once. Returns the `UnreachableError` that it raised.

    Returns `None` if the check passed or failed in another way, such as by a timeout.
    """
    try:
        async with asyncio.timeout(CHECK_SEC):
            await check()
    except UnreachableError as error:
        return error
    except Exception as error:
        logger.debug("A check failed", exc_info=error)
    return None
