"""The `Tracker` protocol: where a run's metrics go. A tracker is never on the critical path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ares_exp.results import EpisodeResult
from ares_exp.run_summary import RunSummary

if TYPE_CHECKING:
    from ares_exp.trajectories.records import EpisodeTrajectory


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker is told about the run.

    Attributes:
        run_dir: The run directory; everything that a tracker writes stays below it.
        name: Name for people.
        run_id: Unique; a resumed run keeps it.
        config: The resolved config, JSON-ready, without secrets.
        provenance: What `collect_provenance` found.
        group: The sweep or series that the run belongs to, if any.
        job_type: Kind of run within its group, if any.
        tags: Labels.
        resumed: Whether the run goes on after it was ended: what came before is recorded already.
        earlier: The results that were recorded before this session: they count in running totals.
        task_set: Where the task set lies; `None` when it has no place.
        tasks: Names of the selected tasks.
        task_digests: What tells whether a task has changed, of those that can say it.
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


class Tracker(Protocol):
    """Receives what happens in a run: `start`, any number of `log_episode` and `log_system`, `finish`.

    No method raises: what goes wrong is logged once and counted in `failures`.
    """

    @property
    def failures(self) -> int:
        """How many times the tracker failed so far."""
        ...

    def start(self, run: RunInfo) -> None:
        """Begins. Returns at once: slow work goes on behind."""
        ...

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records a finished try of an attempt, with its trajectory if one was kept. Returns at once."""
        ...

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Records how the runner itself does (`system/loop_lag_sec`, …). Returns at once."""
        ...

    def finish(self, summary: RunSummary) -> None:
        """Records the totals and releases everything. May block, within its own bound: call it in a thread."""
        ...
