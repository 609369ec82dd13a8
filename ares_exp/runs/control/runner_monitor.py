"""Periodic metrics of the process that executes a run, and warnings about stuck episodes."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from ares_exp.runs.running_episode import RunningEpisode


class ProcessFigures:
    """Metrics of the current process, such as its CPU use and memory, without containers and child processes."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def take(self) -> dict[str, float]:
        """Returns the metrics by name. Omits metrics that this operating system does not provide.

        `system/cpu_percent` is the mean since the last call (100 is one core). The unit of `system/rss_mb` is MiB.
        """
        wall, cpu = time.monotonic(), time.process_time()
        figures: dict[str, float] = {"system/threads": threading.active_count()}
        if wall > self._wall:
            figures["system/cpu_percent"] = 100 * (cpu - self._cpu) / (wall - self._wall)
        self._wall, self._cpu = wall, cpu
        with suppress(OSError, ValueError, IndexError):  # macOS has no /proc
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            figures["system/rss_mb"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        with suppress(OSError), os.scandir("/dev/fd") as listed:
            figures["system/open_files"] = sum(1 for _ in listed) - 1  # without the descriptor of this listing
        return figures


TICK_SEC = 0.25
"""Interval of the timer that measures the lag, in seconds."""
LOOK_SEC = 1.0
"""Interval in seconds at which the checking thread looks at the timer."""
BLOCKED_SEC = 5.0
"""Lag after which the thread reports that the event loop is blocked, in seconds."""
_STOP_TIMEOUT_SEC = 2.0
_SHOWN_CALLS = 8
_NAMED = 3

logger = logging.getLogger(__name__)


class LoopLag:
    """Measures the lag of the event loop: how late a periodic timer runs.

    A separate thread checks the timer. If the timer is late by more than `blocked_sec`, the thread reports which call
    blocks the loop and therefore all episodes. It reports each blockage once. `max_sec` is the longest lag so far, in
    seconds.
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
        """Stores the arguments. `start()` starts the measurement. `warn` is called in the checking thread."""
        self.max_sec = 0.0
        self._warn = warn
        self._tick_sec = tick_sec
        self._look_sec = look_sec
        self._blocked_sec = blocked_sec
        self._clock = clock
        self._due = clock()
        self._reported_due: float | None = None
        self._lags: list[float] = []
        self._timer: asyncio.TimerHandle
        self._loop_thread = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="loop-lag", daemon=True)

    def start(self) -> None:
        """Starts the timer on the running event loop, and the thread that checks it."""
        self._loop_thread = threading.get_ident()
        self._schedule()
        self._thread.start()

    def stop(self) -> None:
        """Stops the timer and the thread, which `start()` started. Idempotent."""
        self._stopped.set()
        self._timer.cancel()
        self._thread.join(_STOP_TIMEOUT_SEC)

    def take(self) -> tuple[float, float]:
        """Returns the longest and the mean lag since the last call, in seconds. Must be called on the event loop."""
        if (late := self._clock() - self._due) > 0:
            self._measure(late)
        lags, self._lags = self._lags, []
        return max(lags, default=0.0), sum(lags) / max(len(lags), 1)

    def _schedule(self) -> None:
        self._due = self._clock() + self._tick_sec
        self._timer = asyncio.get_running_loop().call_later(self._tick_sec, self._tick)

    def _tick(self) -> None:
        self._measure(max(self._clock() - self._due, 0.0))
        self._schedule()

    def _measure(self, lag: float) -> None:
        self._lags.append(lag)
        self.max_sec = max(self.max_sec, lag)

    def _look_after(self) -> None:
        """Checks in a thread whether the timer is late.

        This thread is also stopped if the whole process is stopped (for example, by Ctrl-Z). Such delays are ignored.
        """
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
            f"The event loop has been blocked for {late:.0f} s by {_calls(frame)}. Episodes cannot "
            "continue during this time. Use `asyncio.to_thread` for blocking calls."
        )


def _calls(frame: FrameType | None) -> str:
    """Returns the call stack of `frame` as text, from the innermost call to the last call before the event loop."""
    calls: list[str] = []
    while frame is not None and len(calls) < _SHOWN_CALLS:
        code = frame.f_code
        if code.co_filename == asyncio.events.__file__:
            break
        calls.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return ", called by ".join(calls) or "no Python code"


class Watchdog:
    """Warns about episodes that wait too long. Warns again about an episode whenever its wait has doubled."""

    def __init__(self, stall_warn_sec: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_warn_sec = stall_warn_sec
        self._clock = clock
        self._stalls: dict[str, tuple[float, float]] = {}  # start of the wait, and seconds until the next warning

    def check(self, episodes: Iterable[RunningEpisode]) -> list[str]:
        """Returns the due warnings as sentences. Episodes that wait for the same thing share one sentence."""
        now, seen, places = self._clock(), self._stalls, dict[str, list[tuple[float, Any]]]()
        self._stalls = {}
        for episode in episodes:
            episode_id, waited = episode.planned.episode_id, now - episode.since
            since, warn_after_sec = seen.get(episode_id, (episode.since, self._stall_warn_sec))
            if since != episode.since:
                warn_after_sec = self._stall_warn_sec
            if waited >= warn_after_sec:
                places.setdefault(_place(episode), []).append((waited, episode))
            while warn_after_sec <= waited:
                warn_after_sec *= 2
            self._stalls[episode_id] = episode.since, warn_after_sec
        return [_sentence(place, stalled) for place, stalled in places.items()]


_PLACES: Mapping[tuple[str, str | None], str] = {
    ("start", "start"): "its container to start",
    ("start", "agent"): "its agent's first request",
    ("start", None): "its start",
    ("policy", None): "the policy",
    ("environment", "agent"): "its agent, which is working in the container",
    ("environment", "verify"): "its verifier",
    ("environment", None): "its environment",
    ("end", None): "its resources to be released",
}
"""What an episode waits for, by its `waits_for` and the phase of its environment; `None` for all other phases."""


def _place(episode: RunningEpisode) -> str:
    return _PLACES.get((episode.waits_for, episode.report().phase)) or _PLACES[episode.waits_for, None]


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


class RunnerMonitor:
    """Samples metrics of a run and warns about stuck episodes while the block `async with RunnerMonitor(…):` runs.

    A sample contains the longest and the mean lag of the event loop since the last sample, and the metrics of
    `ProcessFigures`. It also contains the numbers of queued episodes, of running episodes (in total and by phase), and
    of their containers. If taking a sample or checking the episodes fails, the run continues. `failures` counts such
    errors.
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
        """Stores the arguments. Entering the context starts the monitoring.

        `report` is called with every sample on the event loop, and must return immediately. `warn` is called on the
        event loop or, if the loop is blocked, in a thread. `figures` returns additional metrics by name. An episode
        that has made no progress for `stall_warn_sec` seconds causes a warning.
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
        self._task: asyncio.Task[None]

    @property
    def max_loop_lag_sec(self) -> float:
        """The longest lag of the event loop so far, in seconds."""
        return self._lag.max_sec

    async def __aenter__(self) -> Self:
        self._lag.start()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._task.cancel()
        self._look()
        self._lag.stop()
        await asyncio.wait({self._task})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_sec)
            self._look()

    def _look(self) -> None:
        """Warns about stuck episodes, and takes a sample. Counts failures, so that the run continues."""
        try:
            for sentence in self._watchdog.check(self._episodes()):
                self._warn(sentence)
            self._report(self._sample())
        except Exception as error:
            self.failures += 1
            level = logging.WARNING if self.failures == 1 else logging.DEBUG
            logger.log(level, "Monitoring the run failed: %s: %s", type(error).__name__, error)

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
