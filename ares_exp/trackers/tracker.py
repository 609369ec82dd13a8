"""The interface of trackers, which record the metrics of a run, and a tracker that forwards to several trackers.

The run never waits for a tracker before its end. A tracker can write its files in the thread of a `BackgroundWriter`.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ares_exp.config.parts import completed
from ares_exp.records.results import EpisodeResult, RunSummary
from ares_exp.records.terminal_text import one_line
from ares_exp.trajectories.records import EpisodeTrajectory

FINISH_TIMEOUT_SEC = 600.0
"""Time limit in seconds for the `finish` of all trackers, which run concurrently. It protects against trackers that
hang."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The description of a run that trackers receive at its start.

    Attributes:
        run_dir: The run directory, which contains all files of the trackers.
        run_id: Unique id, which does not change when the run is resumed.
        config: The resolved config as JSON values, without secrets.
        provenance: Result of `collect_provenance`.
        group: The sweep or series of the run, if any.
        job_type: Kind of run within its group, if any.
        resumed: Whether the run was started before, so that this is not its first session.
        earlier: Results of episodes in earlier sessions, which count in the totals.
        task_set: Folder or file of the task set, or `None` if the tasks are not in files.
        tasks: Names of the selected tasks.
        task_digests: Digest of each task by name, which shows changes to the task. An unknown digest is `None`.
        parents: Run directories of the runs that this run branches from or replays.
    """

    run_dir: Path
    name: str
    run_id: str
    config: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    resumed: bool = False
    earlier: tuple[EpisodeResult, ...] = ()
    task_set: Path | None = None
    tasks: tuple[str, ...] = ()
    task_digests: Mapping[str, str | None] = field(default_factory=dict)
    parents: tuple[Path, ...] = ()


@runtime_checkable
class Tracker(Protocol):
    """Records the metrics of a run. The run calls `start` first, then `log_episode` for each episode, then `finish`.

    A tracker must have these methods. It can inherit the optional members from `TrackerBase`, or define some of them.
    """

    def start(self, run: RunInfo) -> None:
        """Starts the tracker. Returns immediately: slow work runs in the background."""
        ...

    def log_episode(self, result: EpisodeResult) -> None:
        """Records an episode that has ended. Returns immediately."""
        ...

    def finish(self, summary: RunSummary) -> None:
        """Records the totals and releases all resources. May block, because the run calls it in a separate thread."""
        ...


class TrackerBase(Tracker):
    """Base class of trackers, with defaults for the optional members.

    Methods should not raise exceptions. Log a problem once, and count it in `failures`.
    """

    @property
    def failures(self) -> int:
        """Number of failures of the tracker so far. Default: 0."""
        return 0

    @property
    def place(self) -> str | None:
        """A line that the run prints after `finish`, such as the URL of the tracked run. Default: `None`."""
        return None

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records an episode that has ended. `trajectory` is `None` if it was not kept. Returns immediately."""
        raise NotImplementedError

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Records measurements of the run's process (`system/…`). Returns immediately. Default: does nothing."""

    def log_order(self, line: Mapping[str, Any]) -> None:
        """Records a command to the run (a line of `control.jsonl`). Returns immediately. Default: does nothing."""


class NullTracker(TrackerBase):
    """A `Tracker` that records nothing."""

    def start(self, run: RunInfo) -> None:
        """Does nothing."""

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records nothing."""

    def finish(self, summary: RunSummary) -> None:
        """Does nothing."""


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


_Inbox = queue.SimpleQueue[Callable[[], object] | None]


class BackgroundWriter:
    """Calls functions in a background thread, in the order in which they were passed to `do`.

    A tracker uses it to write its files, so that the run never waits for a disk.

    If a function raises an exception, this is counted as a failure. The first failure is logged as a warning, and later
    ones at the debug level.

    Attributes:
        failures: Number of failures so far.
    """

    def __init__(self, what: str) -> None:
        """Creates a writer, but not its thread. Messages start with `what`, the name of the tracker."""
        self.failures = 0
        self._what = what
        self._inbox: _Inbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread with an empty queue."""
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(self._inbox,), name="tracker", daemon=True)
        self._thread.start()

    def do(self, act: Callable[[], object]) -> None:
        """Adds a function to the queue. Returns immediately. Does nothing before `start` and after `finish`."""
        if self._thread is not None:
            self._inbox.put(act)

    @property
    def waiting(self) -> int:
        """Number of functions in the queue."""
        return self._inbox.qsize()

    def finish(self, timeout_sec: float) -> None:
        """Waits until the functions in the queue have been called, for at most `timeout_sec`. Then ends the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._inbox.put(None)
        thread.join(timeout_sec)
        if thread.is_alive():
            self.report(f"did not finish within {timeout_sec:g} s; its files so far are on disk")

    def report(self, what: str) -> None:
        """Counts a failure, which `what` describes. Logs the first one as a warning, later ones for debugging."""
        self.failures += 1
        _logger.log(logging.WARNING if self.failures == 1 else logging.DEBUG, "%s %s", self._what, what)

    def _work(self, inbox: _Inbox) -> None:
        while (act := inbox.get()) is not None:
            try:
                act()
            except Exception as error:
                self.report(f"failed: {error_line(error)}")


def error_line(error: Exception) -> str:
    """Formats an error on one line: its type and the start of its message."""
    return one_line(f"{type(error).__name__}: {error}", 300)
