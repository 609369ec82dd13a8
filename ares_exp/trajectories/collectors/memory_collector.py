"""The collector that keeps episodes in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.trajectories.collector import EpisodeCollector, EpisodeHandle
from ares_exp.trajectories.records import EpisodeTrajectory


class MemoryTrajectoryCollector(EpisodeCollector):
    """Keeps finished episodes in `episodes`, in the order in which they ended. For notebooks, trainers and tests."""

    @validate_call
    def __init__(
        self, *, keep: Annotated[int, Field(ge=1)] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Creates a collector without episodes.

        Args:
            keep: Number of episodes to keep. Older episodes are dropped. `None` keeps all episodes.
            clock: Function that returns epoch seconds.
        """
        super().__init__(clock=clock)
        self.episodes: list[EpisodeTrajectory] = []
        self._keep = keep

    def _ended(self, handle: EpisodeHandle, trajectory: EpisodeTrajectory) -> None:
        self.episodes.append(trajectory)
        if self._keep is not None:
            del self.episodes[: -self._keep]
