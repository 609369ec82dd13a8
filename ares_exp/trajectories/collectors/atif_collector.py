"""The collector that writes a JSON file an episode, and an ATIF document beside it."""

from __future__ import annotations

import logging

from ares_exp.trajectories.atif.writer import ATIF_SUFFIX, write_atif
from ares_exp.trajectories.collector import EpisodeHandle
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.trajectories.records import EpisodeTrajectory

logger = logging.getLogger(__name__)


class AtifTrajectoryCollector(JsonTrajectoryCollector):
    """Writes `{output_dir}/{episode_id}.json` and, when the episode ends, `….atif.json`: see `atif.writer`.

    The JSON file is the record, from which runs are resumed, replayed and shown. What the format has no field for is
    named in the document's `notes`, and logged, each kind once.
    """

    exports = (ATIF_SUFFIX,)
    _told: frozenset[str] = frozenset()

    def _ended(self, handle: EpisodeHandle, trajectory: EpisodeTrajectory) -> None:
        super()._ended(handle, trajectory)
        path = self.output_dir / f"{trajectory.episode_id}{ATIF_SUFFIX}"
        for what in write_atif(path, trajectory):
            if what not in self._told:
                self._told |= {what}
                logger.warning("%s: %s. For later episodes only their `notes` say so.", path.name, what)
