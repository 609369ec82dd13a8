"""The collector that writes a JSON file an episode, and a Parquet file beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ares_exp.trajectories.collector import EpisodeHandle
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.trajectories.exports.parquet_export import PARQUET_SUFFIX, import_parquet, write_parquet
from ares_exp.trajectories.records import EpisodeTrajectory


class ParquetTrajectoryCollector(JsonTrajectoryCollector):
    """Writes `{output_dir}/{episode_id}.json` and, when the episode ends, `….parquet`: see `parquet_export`.

    The JSON file is the record, from which runs are resumed, replayed and shown.
    """

    exports = (PARQUET_SUFFIX,)

    def __init__(
        self,
        output_dir: str | Path,
        *,
        compression: Literal["zstd"] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes the directory; `begin_episode` makes it.

        Args:
            output_dir: Made when the first episode begins.
            compression: `"zstd"` writes `{episode_id}.json.zst`.
            clock: Gives epoch seconds.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        super().__init__(output_dir, compression=compression, clock=clock)
        import_parquet()

    def _ended(self, handle: EpisodeHandle, trajectory: EpisodeTrajectory) -> None:
        super()._ended(handle, trajectory)
        path = self.output_dir / f"{trajectory.episode_id}{PARQUET_SUFFIX}"
        write_parquet(path, [trajectory])
