"""The runner's own metrics, every few seconds, and warnings of episodes that are stuck."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from ares_exp.runs.running_episode import RunningEpisode


class ProcessFigures:
    """Figures of this process, without those of the containers or of other processes that it started."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def take(self) -> dict[str, float]:
        """Returns the figures by metric; leaves out those that the system does not provide.

        `system/cpu_percent` is the mean since the last call (100 is one core), `system/rss_mb` are MiB.
        """
        wall, cpu = time.monotonic(), time.process_time()
        figures: dict[str, float] = {"system/threads": threading.active_count()}
        if wall > self._wall:
            figures["system/cpu_percent"] = 100 * (cpu - self._cpu) / (wall - self._wall)
        self._wall, self._cpu = wall, cpu
        with suppress(OSError, ValueError, IndexError):  # there is no /proc on macOS
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            figures["system/rss_mb"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        with suppress(OSError), os.scandir("/dev/fd") as listed:
            figures["system/open_files"] = sum(1 for _ in listed) - 1  # without the descriptor of the listing itself
        return figures


TICK_SEC = 0.25
LOOK_SEC = 1.0
BLOCKED_SEC = 5.0
_STOP_TIMEOUT_SEC = 2.0
_SHOWN_CALLS = 8


class LoopLag:
    """A timer on the event loop compares when it runs with when it should: the difference is the lag.

    A thread looks after the timer. While it is late by more than `blocked_sec`, the thread reports, once, what the loop
    is doing: the call that every episode waits for.

    Attributes:
        max_sec: The longest lag of all.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        *,
        tick_sec: float = TICK_SEC,
        look_sec: float = LOOK_SEC,
        blocked_sec: float = BLOCKED_SEC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keeps the arguments; `start` starts to measure.

        Args:
            warn: Is given the sentence about a blocked loop, in the thread: the loop cannot.
            tick_sec: Seconds between two measurements.
            look_sec: Seconds between two looks of the thread.
            blocked_sec: Seconds after which a loop counts as blocked.
            clock: Seconds that only grow.
        """
        self.max_sec = 0.0
        self._warn = warn
        self._tick_sec = tick_sec
        self._look_sec = look_sec
        self._blocked_sec = blocked_sec
        self._clock = clock
        self._due = clock()
        self._reported_due: float | None = None
        self._sum, self._count, self._max = 0.0, 0, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop_thread = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts timer and thread on the running event loop."""
        self._loop_thread = threading.get_ident()
        self._schedule()
        self._thread = threading.Thread(target=self._look_after, name="loop-lag", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends timer and thread. Idempotent."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_SEC)
            self._thread = None

    def take(self) -> tuple[float, float]:
        """Returns longest and mean lag in seconds since the last call. Must be called on the event loop."""
        if (late := self._clock() - self._due) > 0:
            self._measure(late)
        longest, mean = self._max, self._sum / max(self._count, 1)
        self._sum, self._count, self._max = 0.0, 0, 0.0
        return longest, mean

    def _schedule(self) -> None:
        self._due = self._clock() + self._tick_sec
        self._timer = asyncio.get_running_loop().call_later(self._tick_sec, self._tick)

    def _tick(self) -> None:
        self._measure(max(self._clock() - self._due, 0.0))
        self._schedule()

    def _measure(self, lag: float) -> None:
        self._sum, self._count = self._sum + lag, self._count + 1
        self._max, self.max_sec = max(self._max, lag), max(self.max_sec, lag)

    def _look_after(self) -> None:
        """Runs in the thread. If the thread itself is late, the whole process was stopped, and no call is to blame."""
        awake_since = before = self._clock()
        while not self._stopped.wait(self._look_sec):
            now = self._clock()
            if now - before > self._look_sec + 1:
                awake_since = now
            before = now
            due = self._due
            late = now - max(due, awake_since)
            if late > self._blocked_sec and due != self._reported_due:
                self._reported_due = due
                self._report(late)

    def _report(self, late: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        self._warn(
            f"The event loop has been blocked for {late:.0f} s by {_calls(frame)}. "
            "No episode continues meanwhile. Use `asyncio.to_thread` for blocking calls."
        )


def _calls(frame: FrameType | None) -> str:
    """Formats the call stack that ends in `frame`, innermost call first, up to the event loop's first call."""
    calls: list[str] = []
    while frame is not None and len(calls) < _SHOWN_CALLS:
        code = frame.f_code
        if code.co_filename == asyncio.events.__file__:
            break
        calls.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return ", called by ".join(calls) or "no Python code"


_NAMED = 3


@dataclass(slots=True)
class _Stall:
    since: float
    warn_after_sec: float


class Watchdog:
    """Reports each episode without progress once, and again each time that the waiting time has doubled.

    An episode makes progress when the policy has answered and when the environment asks again.
    """

    def __init__(self, stall_warn_sec: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_warn_sec = stall_warn_sec
        self._clock = clock
        self._stalls: dict[str, _Stall] = {}

    def check(self, episodes: Iterable[RunningEpisode]) -> list[str]:
        """Returns the new warnings: one sentence for each place where episodes wait."""
        now, seen, places = self._clock(), self._stalls, dict[str, list[tuple[float, Any]]]()
        self._stalls = {}
        for episode in episodes:
            episode_id, since = episode.planned.episode_id, episode.since
            stall = seen.get(episode_id)
            if stall is None or stall.since != since:
                stall = _Stall(since, self._stall_warn_sec)
            self._stalls[episode_id] = stall
            waited = now - since
            if waited >= stall.warn_after_sec:
                places.setdefault(_place(episode), []).append((waited, episode))
                while stall.warn_after_sec <= waited:
                    stall.warn_after_sec *= 2
        return [_sentence(place, stalled) for place, stalled in places.items()]


def _place(episode: RunningEpisode) -> str:
    match episode.waits_for, episode.report().phase:
        case "start", "start":
            return "its container to start"
        case "start", "agent":
            return "its agent's first request"
        case "start", _:
            return "its start"
        case "policy", _:
            return "the policy"
        case "environment", "agent":
            return "its agent, at work in the container"
        case "environment", "verify":
            return "its verifier"
        case "environment", _:
            return "its environment"
        case _:
            return "its resources to be released"


def _sentence(place: str, stalled: list[tuple[float, RunningEpisode]]) -> str:
    stalled.sort(key=lambda one: -one[0])
    waited, episode = stalled[0]
    if len(stalled) == 1:
        planned = episode.planned
        return (
            f"Episode {planned.episode_id} of task {planned.task_name} has waited {waited:.0f} s for {place} "
            f"(step {episode.usage.num_steps})."
        )
    named = [f"{one.planned.episode_id} (step {one.usage.num_steps})" for _, one in stalled[:_NAMED]]
    if len(stalled) > _NAMED:
        named.append(f"{len(stalled) - _NAMED} more")
    return f"{len(stalled)} episodes have waited up to {waited:.0f} s, each for {place}: {', '.join(named)}."


_logger = logging.getLogger(__name__)


class RunnerMonitor:
    """Watches a run while its body runs: `async with RunnerMonitor(…):`.

    A sample has `system/loop_lag_sec` (the longest since the last sample) and `system/loop_lag_mean_sec`;
    `system/episodes_running`, and of these `…_waiting_start`, `…_waiting_policy`, `…_waiting_environment` and
    `…_waiting_end`; `system/containers`, those that episodes hold; `system/queue`; and what `ProcessFigures` says.

    Attributes:
        failures: How many samples or looks failed. They fail nothing else.
    """

    def __init__(
        self,
        episodes: Callable[[], Iterable[RunningEpisode]],
        report: Callable[[Mapping[str, float]], None],
        warn: Callable[[str], None],
        *,
        interval_sec: float = 10.0,
        stall_warn_sec: float = 600.0,
        queued: Callable[[], int] = lambda: 0,
        figures: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Keeps the arguments; entering starts the monitoring.

        Args:
            episodes: The running episodes.
            report: Receives every sample, on the event loop: it must return at once.
            warn: Receives warnings to be logged, on the event loop or, when that is blocked, in a thread.
            interval_sec: Seconds between two samples, and between two looks at the episodes.
            stall_warn_sec: Seconds without progress after which an episode is reported.
            queued: Returns the number of tries that wait for a slot or for their time.
            figures: Returns further metrics, by name.
        """
        self.failures = 0
        self._episodes = episodes
        self._report = report
        self._warn = warn
        self._interval_sec = interval_sec
        self._queued = queued
        self._lag = LoopLag(warn)
        self._watchdog = Watchdog(stall_warn_sec)
        self._figures = ProcessFigures()
        self._more = figures
        self._task: asyncio.Task[None] | None = None

    @property
    def max_loop_lag_sec(self) -> float:
        """The longest that the event loop was late so far."""
        return self._lag.max_sec

    async def __aenter__(self) -> Self:
        self._lag.start()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        self._take_sample()
        self._lag.stop()
        await asyncio.wait({self._task})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_sec)
            self._take_sample()
            self._look()

    def _take_sample(self) -> None:
        with self._counting_failures():
            self._report(self._sample())

    def _look(self) -> None:
        with self._counting_failures():
            for sentence in self._watchdog.check(self._episodes()):
                self._warn(sentence)

    def _sample(self) -> dict[str, float]:
        episodes = [*self._episodes()]
        waiting = Counter(episode.waits_for for episode in episodes)
        longest, mean = self._lag.take()
        return {
            "system/loop_lag_sec": longest,
            "system/loop_lag_mean_sec": mean,
            "system/episodes_running": len(episodes),
            **{f"system/episodes_waiting_{what}": waiting[what] for what in ("start", "policy", "environment", "end")},
            "system/containers": sum(episode.report().has_container for episode in episodes),
            "system/queue": self._queued(),
            **self._figures.take(),
            **self._more(),
        }

    @contextlib.contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures += 1
            level = logging.WARNING if self.failures == 1 else logging.DEBUG
            _logger.log(level, "Monitoring the run failed: %s: %s", type(error).__name__, error)
