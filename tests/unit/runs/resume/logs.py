"""The log of an episode outside of a run."""

from __future__ import annotations

from pathlib import Path

from ares_exp.records.run_dir import RunDir
from ares_exp.records.run_storage import RunStorage
from ares_exp.trajectories.answer_log import AnswerLog, LoggedEpisode


def log_in(folder: Path, episode: LoggedEpisode) -> AnswerLog:
    return AnswerLog(folder, episode, RunStorage(RunDir(folder.parent)))
