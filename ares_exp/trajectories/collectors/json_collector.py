"""The collector that writes one JSON file per episode."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import validate_call

from ares_exp.run_dir import append_text, sync_to_disk
from ares_exp.trajectories.collectors.episode_files import EpisodeFiles
from ares_exp.trajectories.collectors.grouped_sync import Durability
from ares_exp.trajectories.files.episode_file import closing_line, dump_episode
from ares_exp.trajectories.files.line_file import ZSTD, write_lines
from ares_exp.trajectories.records import EpisodeTrajectory


class JsonTrajectoryCollector(EpisodeFiles):
    """Writes `{output_dir}/{episode_id}.json`, step by step; the finished file appears when the episode ends."""

    @validate_call
    def __init__(
        self,
        output_dir: str | Path,
        *,
        compression: Literal["zstd"] | None = None,
        durability: Durability = "episode",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Touches nothing yet.

        Args:
            output_dir: Made when the first episode begins.
            compression: `"zstd"` writes `{episode_id}.json.zst`.
            durability: What a power cut may take; see `Durability`.
            clock: Gives epoch seconds.
        """
        super().__init__(output_dir, durability=durability, clock=clock)
        self.suffix = f".json{ZSTD}" if compression == "zstd" else ".json"

    def _finish(self, partial: Path | None, path: Path, trajectory: EpisodeTrajectory) -> None:
        sync = self._durability != "none"
        if partial is None or path.suffix == ZSTD:
            write_lines(path, dump_episode(trajectory), sync=sync)
        else:
            append_text(partial, closing_line(trajectory), sync=sync)
            partial.rename(path)
            if sync:
                sync_to_disk(path.parent)
