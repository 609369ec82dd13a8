"""The collector that writes one JSON file per episode."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from ares_exp.run_dir import write_atomically
from ares_exp.trajectories.collector import EpisodeHandle, MemoryEpisodes
from ares_exp.trajectories.records import EpisodeTrajectory

SAFE_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


class JsonTrajectoryCollector(MemoryEpisodes):
    """Writes `{output_dir}/{episode_id}.json` when an episode ends; the file appears whole or not at all."""

    def __init__(self, output_dir: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        """`output_dir` is made when the first episode ends. `clock` gives epoch seconds."""
        super().__init__(clock=clock)
        self.output_dir = Path(output_dir)

    def begin_episode(
        self, *, task_name: str, episode_id: str | None = None, start_time: float | None = None
    ) -> EpisodeHandle:
        """Opens an episode; its id must be usable as a file name."""
        if episode_id is not None and not SAFE_NAME.fullmatch(episode_id):
            raise ValueError(f"Expected an episode id of letters, digits, '.', '_' and '-', got {episode_id!r}.")
        return super().begin_episode(task_name=task_name, episode_id=episode_id, start_time=start_time)

    def _keep(self, trajectory: EpisodeTrajectory) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(self.output_dir / f"{trajectory.episode_id}.json", trajectory.to_json())
