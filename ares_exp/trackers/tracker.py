"""The contract of trackers, which record the metrics of a run. A run in progress never waits for a tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_summary import RunSummary

if TYPE_CHECKING:
    from ares_exp.trajectories.records import EpisodeTrajectory


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The description of a run that trackers receive at its start.

    Attributes:
        run_dir: The run directory, which contains all files of the trackers.
        name: Display name.
        run_id: Unique id, which does not change when the run is resumed.
        config: The resolved config as JSON values, without secrets.
        provenance: Result of `collect_provenance`.
        group: The sweep or series of the run, if any.
        job_type: Kind of run within its group, if any.
        tags: Labels.
        resumed: Whether the run has an earlier recorded session.
        earlier: Results of earlier sessions, which are included in running totals.
        task_set: Folder or file of the task set, or `None` if the tasks are not in files.
        tasks: Names of the selected tasks.
        task_digests: Digests of the tasks, which show whether a task has changed. `None` if unknown.
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
    """Receives the events of a run: first `start`, then a `log_episode` for each episode, then `finish`.

    These members are required. A tracker can also define some of the optional members, or inherit from `TrackerBase`,
    which has defaults for all of them.
    """

    def start(self, run: RunInfo) -> None:
        """Starts the tracker. Returns immediately: slow work runs in the background."""
        ...

    def log_episode(self, result: EpisodeResult) -> None:
        """Records a finished episode of an attempt. Returns immediately."""
        ...

    def finish(self, summary: RunSummary) -> None:
        """Records the totals and releases all resources. May block, because the run calls it in a separate thread."""
        ...


class TrackerBase(Tracker):
    """All members of a tracker, with defaults for the optional members.

    No method raises an exception: problems are logged once and counted in `failures`.
    """

    @property
    def failures(self) -> int:
        """Number of failures of the tracker so far. Default: 0."""
        return 0

    @property
    def place(self) -> str | None:
        """A line that the run prints after `finish`: where the record is, or how to upload it. Default: `None`."""
        return None

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records a finished episode of an attempt. `trajectory` is `None` if it was not kept. Returns immediately."""
        raise NotImplementedError

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Records measurements of the runner (`system/loop_lag_sec`, …). Returns immediately. Default: ignores them."""

    def log_order(self, line: Mapping[str, Any]) -> None:
        """Records a command to the run (a line of `control.jsonl`). Returns immediately. Default: ignores it."""


class NullTracker(TrackerBase):
    """A `Tracker` that records nothing."""

    def start(self, run: RunInfo) -> None:
        """Does nothing."""

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records nothing."""

    def finish(self, summary: RunSummary) -> None:
        """Does nothing."""
