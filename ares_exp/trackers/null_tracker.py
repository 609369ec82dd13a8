"""The tracker that records nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ares_exp.results import EpisodeResult
from ares_exp.run_summary import RunSummary
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    from ares_exp.trajectories.records import EpisodeTrajectory


class NullTracker:
    """A `Tracker` that records nothing."""

    failures = 0

    def start(self, run: RunInfo) -> None:
        """Nothing to begin."""

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Nothing is recorded."""

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Nothing is recorded."""

    def finish(self, summary: RunSummary) -> None:
        """Nothing to release."""
