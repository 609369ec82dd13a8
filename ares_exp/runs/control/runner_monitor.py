"""The runner's own metrics, every few seconds, and warnings of episodes that are stuck."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Self

from ares_exp.runs.control.loop_lag import LoopLag
from ares_exp.runs.control.process_figures import ProcessFigures
from ares_exp.runs.control.watchdog import Watchdog
from ares_exp.runs.running_episode import RunningEpisode

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
        """Starts to watch."""
        self._lag.start()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Takes the last sample and releases task and thread."""
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
