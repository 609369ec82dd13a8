"""The contract of a tracker: where a run's metrics go. A tracker is never on the critical path."""

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
    """Description of the run for a tracker.

    Attributes:
        run_dir: The run directory; everything that a tracker writes stays below it.
        name: Name for people.
        run_id: Unique; a resumed run keeps it.
        config: The resolved config, JSON-ready, without secrets.
        provenance: What `collect_provenance` found.
        group: The sweep or series that the run belongs to, if any.
        job_type: Kind of run within its group, if any.
        tags: Labels.
        resumed: Whether an earlier session of the run has recorded already.
        earlier: The results of earlier sessions: they count in running totals.
        task_set: Location of the task set; `None` when it has none.
        tasks: Names of the selected tasks.
        task_digests: Digests that tell whether a task has changed, where known.
        parents: Run directories of the runs that this one was branched from or replays.
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
    """Receives what happens in a run: `start`, any number of `log_episode`, `finish`.

    These members are needed. What else a tracker can be given, and what is assumed of one that does not take it, is
    `TrackerBase`: inherit from that, or have some of its members.
    """

    def start(self, run: RunInfo) -> None:
        """Starts the tracker. Returns at once: slow work runs in the background."""
        ...

    def log_episode(self, result: EpisodeResult) -> None:
        """Records a finished try of an attempt. Returns at once."""
        ...

    def finish(self, summary: RunSummary) -> None:
        """Records the totals and releases everything. May block, within its own bound: it is called in a thread."""
        ...


class TrackerBase(Tracker):
    """Everything that a tracker is given. What a `Tracker` needs not take has its default here.

    No method raises: what goes wrong is logged once and counted in `failures`.
    """

    @property
    def failures(self) -> int:
        """Number of failures of the tracker so far. Default: 0."""
        return 0

    @property
    def place(self) -> str | None:
        """A line for the user, after `finish`: where its record is to be seen, or how it gets there. Default: none."""
        return None

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records a finished try of an attempt, with its trajectory if one was kept. Returns at once."""
        raise NotImplementedError

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Records how the runner itself does (`system/loop_lag_sec`, …). Returns at once. Default: not at all."""

    def log_training(self, values: Mapping[str, float], *, step: int) -> None:
        """Records numbers of a training (`train/reward`, …) at an optimizer step. Default: not at all."""

    def log_order(self, line: Mapping[str, Any]) -> None:
        """Records an order to the run, as a line of `control.jsonl` has it. Returns at once. Default: not at all."""


class NullTracker(TrackerBase):
    """A `Tracker` that records nothing."""

    def start(self, run: RunInfo) -> None:
        """Does nothing."""

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records nothing."""

    def finish(self, summary: RunSummary) -> None:
        """Does nothing."""
