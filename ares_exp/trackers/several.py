"""A tracker that forwards to several trackers, so that the failure of one does not affect the others."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ares_exp.config.parts import completed
from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_summary import RunSummary
from ares_exp.trackers.tracker import RunInfo, Tracker, TrackerBase

if TYPE_CHECKING:
    from ares_exp.trajectories.records import EpisodeTrajectory

FINISH_TIMEOUT_SEC = 600.0
"""Time limit in seconds for the `finish` of all trackers, which run concurrently. It protects against trackers that
hang."""

_logger = logging.getLogger(__name__)


class SeveralTrackers(TrackerBase):
    """Forwards every call to several named trackers, even if one of them raises an exception.

    The trajectory of an episode is passed only to trackers whose `log_episode` has an argument for it.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = {name: completed(one, TrackerBase) for name, one in trackers.items()}
        self._failed: list[str] = []  # threads append names to it
        self._with_trajectory = {name for name, one in self._trackers.items() if _takes_trajectory(one)}

    @property
    def failures(self) -> int:
        """Number of failures so far: failures that the trackers count, and calls that raised an exception."""
        return len(self._failed) + sum(one.failures for one in self._trackers.values())

    @property
    def place(self) -> str | None:
        """The lines that the run prints at its end: each tracker's `place`. `None` if no tracker has a `place`."""
        return "\n".join(filter(None, (one.place for one in self._trackers.values()))) or None

    def start(self, run: RunInfo) -> None:
        """Starts all trackers."""
        for name, tracker in self._trackers.items():
            self._guard(name, tracker.start, run)

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Forwards the result of an episode to every tracker."""
        for name, tracker in self._trackers.items():
            more = (trajectory,) if name in self._with_trajectory else ()
            self._guard(name, tracker.log_episode, result, *more)

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Forwards measurements of the run's process to every tracker."""
        for name, tracker in self._trackers.items():
            self._guard(name, tracker.log_system, sample)

    def log_order(self, line: Mapping[str, Any]) -> None:
        """Forwards a command that the run received to every tracker."""
        for name, tracker in self._trackers.items():
            self._guard(name, tracker.log_order, line)

    def finish(self, summary: RunSummary) -> None:
        """Finishes all trackers concurrently. Stops waiting for a tracker after `FINISH_TIMEOUT_SEC`."""
        threads = [
            threading.Thread(target=self._guard, args=(name, tracker.finish, summary), name=name, daemon=True)
            for name, tracker in self._trackers.items()
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + FINISH_TIMEOUT_SEC
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
            if thread.is_alive():
                self._report(thread.name, f"did not finish within {FINISH_TIMEOUT_SEC:g} s")

    def _guard(self, name: str, act: Callable[..., object], *arguments: object) -> None:
        try:
            act(*arguments)
        except Exception as error:
            self._report(name, f"failed: {type(error).__name__}: {error}")

    def _report(self, name: str, what: str) -> None:
        """Counts a failure of a tracker. Logs its first failure as a warning, later ones for debugging."""
        self._failed.append(name)
        _logger.log(
            logging.WARNING if self._failed.count(name) == 1 else logging.DEBUG, "The tracker %s %s", name, what
        )


def _takes_trajectory(tracker: Tracker) -> bool:
    try:
        inspect.signature(tracker.log_episode).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True
