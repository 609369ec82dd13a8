"""The collector that writes one Parquet file per episode."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ares_exp.trajectories.collectors.episode_files import EpisodeFiles
from ares_exp.trajectories.collectors.grouped_sync import Durability
from ares_exp.trajectories.files.parquet_file import import_parquet, write_parquet
from ares_exp.trajectories.records import EpisodeTrajectory


class ParquetTrajectoryCollector(EpisodeFiles):
    """Writes `{output_dir}/{episode_id}.parquet`, a row a step; see `parquet_columns`."""

    suffix = ".parquet"

    def __init__(
        self, output_dir: str | Path, *, durability: Durability = "episode", clock: Callable[[], float] = time.time
    ) -> None:
        """Touches nothing yet.

        Args:
            output_dir: Made when the first episode begins.
            durability: What a power cut may take; see `Durability`.
            clock: Gives epoch seconds.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        super().__init__(output_dir, durability=durability, clock=clock)
        import_parquet()

    def _finish(self, partial: Path | None, path: Path, trajectory: EpisodeTrajectory) -> None:
        write_parquet(path, [trajectory], sync=self._durability != "none")
