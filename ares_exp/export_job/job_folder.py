"""Writes the folder of a job. It appears whole, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError, TrajectoryFormatError
from ares_exp.export_job.copied_files import copy_file
from ares_exp.export_job.harbor_config import JOB, job_config, trial_config, without_defaults
from ares_exp.export_job.job_result import job_result
from ares_exp.export_job.locks import job_lock, trial_lock
from ares_exp.export_job.log_lines import lines_by_episode
from ares_exp.export_job.names import stable_id, trial_name
from ares_exp.export_job.recorded_job import Attempt, RecordedJob
from ares_exp.export_job.stage_trajectories import of_stages
from ares_exp.export_job.task_facts import tasks_of
from ares_exp.export_job.trial_folder import is_file_name, write_json, write_trial
from ares_exp.export_job.trial_result import TrialIdentity
from ares_exp.new_folder import appearing
from ares_exp.trajectories.atif.conversion import to_atif
from ares_exp.trajectories.stored_episode import StoredEpisode
from ares_exp.trajectories.stored_episodes import load


@dataclass(frozen=True, slots=True)
class ExportedJob:
    """What was written.

    Attributes:
        result: The `result.json` of the job.
        warnings: What the user should know.
    """

    result: Mapping[str, Any]
    warnings: tuple[str, ...]


def write_job(job: RecordedJob, jobs_dir: Path, name: str) -> ExportedJob:
    """Writes `<jobs_dir>/<name>`.

    Raises:
        ConfigError: There is something already, or it cannot be written.
    """
    try:
        with appearing(jobs_dir / name) as place:
            return _Writer(job, place, jobs_dir.resolve(), name).write()
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"Cannot write {jobs_dir / name}: {what}{error.strerror or error}.") from None


class _Writer:
    def __init__(self, job: RecordedJob, place: Path, jobs_dir: Path, name: str) -> None:
        """`place` becomes `<jobs_dir>/<name>` when all is written."""
        self._job, self._place, self._jobs_dir, self._name = job, place, jobs_dir, name
        self._job_id = stable_id(job.run_id)
        self._tasks = tasks_of(job)
        self._config = job_config(job, list(self._tasks.values()), name=name, jobs_dir=str(jobs_dir))
        self._warnings: list[str] = []

    def write(self) -> ExportedJob:
        job = self._job
        stored, ids = self._trajectories(), [one.episode_id for one in job.attempts]
        logs = lines_by_episode(job.run_dir.log, ids)
        trials = []
        for attempt in job.attempts:
            log = logs.get(attempt.episode_id, ())
            trials.append(self._write_trial(attempt, stored.get(attempt.episode_id), log))
        result = job_result(job, [one for one in trials if one is not None], job_id=self._job_id)
        write_json(self._place / "config.json", without_defaults(self._config, JOB))
        write_json(self._place / "result.json", result)
        self._write_lock()
        copy_file(job.run_dir.log, self._place / "job.log")
        return ExportedJob(result, tuple(self._warnings))

    def _trajectories(self) -> dict[str, StoredEpisode]:
        try:
            episodes = load(self._job.run_dir.path, partial=True, skip_broken=True)
        except TrajectoryFormatError as error:
            self._warnings.append(f"There are no trajectories: {error}")
            return {}
        self._warnings += [f"Left out: {text}" for text in episodes.left_out]
        return {episode.episode_id: episode for episode in episodes}

    def _write_trial(self, attempt: Attempt, stored: StoredEpisode | None, log: Sequence[str]) -> dict[str, Any] | None:
        name = trial_name(attempt.task_name, attempt.episode_id)
        task = self._tasks[attempt.task_name]
        trial = TrialIdentity(
            name=name,
            uri=(self._jobs_dir / self._name / name).as_uri(),
            trial_id=stable_id(self._job.run_id, attempt.episode_id),
            task=task,
            config=trial_config(self._config, task, name=name, job_id=self._job_id),
            agent_version=str(self._job.provenance.get("ares_exp_version") or "unknown"),
        )
        files = self._job.run_dir.files
        return write_trial(
            self._place / name,
            trial,
            attempt.result,
            documents=self._documents(attempt, stored),
            files=files / attempt.episode_id if is_file_name(attempt.episode_id) else files / ".none",
            log=log,
        )

    def _documents(self, attempt: Attempt, stored: StoredEpisode | None) -> list[dict[str, Any] | None]:
        """The ATIF documents of a trial: one, or one for each stage; `None` where there is none."""
        stages = attempt.result.stages if attempt.result is not None else ()
        if stored is None:
            return [None] * max(len(stages), 1)
        try:
            trajectory = stored.load()
            parts = of_stages(trajectory, stages) if stages else [trajectory]
            return [to_atif(part)[0] for part in parts]
        except TrajectoryFormatError as error:
            self._warnings.append(f"The trajectory of {attempt.episode_id} is left out: {error}")
            return [None] * max(len(stages), 1)

    def _write_lock(self) -> None:
        """The lock of all trials that were asked for, if the digests of all tasks are known."""
        tasks = list(self._tasks.values())
        locks = [trial_lock(task, trial_config(self._config, task, name="", job_id=self._job_id)) for task in tasks]
        known = [lock for lock in locks if lock is not None]
        if len(known) < len(locks):
            missing = ", ".join(task.name for task in tasks if task.digest is None)
            self._warnings.append(f"There is no lock.json of the job: the digest is not known of {missing}.")
            return
        write_json(
            self._place / "lock.json",
            job_lock(
                known * self._job.attempts_each,
                created_at=self._job.started_at,
                concurrency=self._config["n_concurrent_trials"],
                retry=self._config["retry"],
            ),
        )
