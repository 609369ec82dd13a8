"""The tracker that records nothing."""

from __future__ import annotations

from ares_exp.results import EpisodeResult, RunSummary
from ares_exp.trackers.tracker import RunInfo


class NullTracker:
    """A `Tracker` that records nothing."""

    failures = 0

    def start(self, run: RunInfo) -> None:
        """Nothing to begin."""

    def log_episode(self, result: EpisodeResult) -> None:
        """Nothing is recorded."""

    def finish(self, summary: RunSummary) -> None:
        """Nothing to release."""
