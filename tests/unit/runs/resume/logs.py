"""The log of an episode outside of a run."""

from pathlib import Path

from ares_exp.records.run_dir import RunDir
from ares_exp.records.run_storage import RunStorage
from ares_exp.trajectories.response_log import LoggedEpisode, ResponseLog


def log_in(folder: Path, episode: LoggedEpisode) -> ResponseLog:
    return ResponseLog(folder, episode, RunStorage(RunDir(folder.parent)))
