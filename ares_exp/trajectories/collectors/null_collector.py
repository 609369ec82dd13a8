"""The collector that stores nothing."""

from __future__ import annotations

from ares_exp.trajectories.collector import EpisodeCollector, EpisodeHandle
from ares_exp.trajectories.records import StepRecord


class NullTrajectoryCollector(EpisodeCollector):
    """Tracks which episodes are open, but stores neither steps nor files."""

    def record_step(self, record: StepRecord, *, episode: EpisodeHandle | None = None) -> None:
        """Drops the step, after checking that an episode is open."""
        self._resolve(episode)
