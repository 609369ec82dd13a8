"""The tracker that records nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_summary import RunSummary
from ares_exp.trackers.tracker import RunInfo, TrackerBase

if TYPE_CHECKING:
    from ares_exp.trajectories.records import EpisodeTrajectory


class NullTracker(TrackerBase):
    """A `Tracker` that records nothing."""

    def start(self, run: RunInfo) -> None:
        """Does nothing."""

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records nothing."""

    def finish(self, summary: RunSummary) -> None:
        """Does nothing."""
