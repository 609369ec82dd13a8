"""The interface of trackers, which record the metrics of a run. The run never waits for a tracker before its end."""

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
