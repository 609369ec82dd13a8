"""The collector that writes one ATIF document per episode."""

from __future__ import annotations

import logging
from pathlib import Path

from ares_exp.trajectories.atif.conversion import ATIF_SUFFIX, write_atif
from ares_exp.trajectories.collectors.episode_files import EpisodeFiles
from ares_exp.trajectories.records import EpisodeTrajectory

logger = logging.getLogger(__name__)


class AtifTrajectoryCollector(EpisodeFiles):
    """Writes `{output_dir}/{episode_id}.atif.json` when an episode ends, in the Agent Trajectory Interchange Format.

    What the format has no field for (see `atif`) is told in the document's `notes`, and logged, each kind once.
    """

    suffix = ATIF_SUFFIX
    _told: frozenset[str] = frozenset()

    def _finish(self, partial: Path | None, path: Path, trajectory: EpisodeTrajectory) -> None:
        dropped = write_atif(path, trajectory, sync=self._durability != "none")
        for what in dropped:
            if what not in self._told:
                self._told |= {what}
                logger.warning("%s: %s. Of later episodes this is told in their `notes` alone.", path.name, what)
