"""The folder of a job with the folders of its trials. The folder is written atomically."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ares_exp.commands.harbor_export.harbor_documents import (
    job_config,
    job_result,
    trial_config,
    trial_error,
    trial_result,
)
from ares_exp.commands.harbor_export.recorded_job import RecordedJob
from ares_exp.environments.scoring.episode_scoring import ARTIFACTS_FOLDER, STEPS_FOLDER, VERIFIER_FOLDER
from ares_exp.errors import ConfigError, TrajectoryFormatError
from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_dir import appearing, dump_json
from ares_exp.records.secrets import KnownSecrets, mask_known_secrets
from ares_exp.trajectories.exports.atif_writer import to_atif
from ares_exp.trajectories.stored_episodes import StoredEpisode, load

AGENT_FOLDER, TRAJECTORY = "agent", "trajectory.json"
MAX_TASK_CHARS, HASH_CHARS = 32, 7
MAX_MASKED_BYTES = 64 * 2**20
"""Maximum size of a file in which secrets are masked. In larger files, the run has masked the task's secrets."""

_NAMESPACE = uuid.UUID("5b0a4c0e-7a0f-5d0c-9a51-5d9f3c1f6a0b")
_FILE_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]+")


def write_job(job: RecordedJob, jobs_dir: Path, name: str) -> tuple[Mapping[str, Any], list[str]]:
    """Writes `<jobs_dir>/<name>`; returns its `result.json` and warnings for the user.

    Raises:
        ConfigError: The folder exists already or cannot be written.
    """
    try:
        with appearing(jobs_dir / name) as place:
            return _Writer(job, place, jobs_dir.resolve(), name).write()
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"Cannot write {jobs_dir / name}: {what}{error.strerror or error}.") from None


def is_file_name(text: str) -> bool:
    """Returns whether a text from a record is safe as a file name, so that it cannot point to another folder."""
    return _FILE_NAME.fullmatch(text) is not None


def trial_name(task_name: str, episode_id: str) -> str:
    """Returns `<task>__<7 characters>`: the start of the task's name and a hash of the episode's id."""
    head = re.sub(r"[^A-Za-z0-9._-]", "-", task_name.split("/")[-1])
    digest = hashlib.sha256(episode_id.encode(errors="backslashreplace")).hexdigest()
    return f"{head[:MAX_TASK_CHARS].lstrip('.').rstrip('_-') or 'task'}__{digest[:HASH_CHARS]}"


def stable_id(*parts: str) -> str:
    """Returns a UUID of the parts. Equal parts always have the same UUID."""
    return str(uuid.uuid5(_NAMESPACE, "/".join(parts).encode(errors="backslashreplace").decode()))


class _Writer:
    def __init__(self, job: RecordedJob, place: Path, jobs_dir: Path, name: str) -> None:
        """Prepares the documents of the folder `place`, which becomes `<jobs_dir>/<name>` when it is complete."""
        self._job, self._place, self._uri = job, place, jobs_dir / name
        self._job_id = stable_id(job.run_id)
        self._config = job_config(job, name=name, jobs_dir=str(jobs_dir))
        self._warnings: list[str] = []

    def write(self) -> tuple[Mapping[str, Any], list[str]]:
        stored = self._trajectories()
        trials = [self._write_trial(one, stored.get(one.episode_id)) for one in self._job.results]
        result = job_result(self._job, trials, job_id=self._job_id)
        _write_json(self._place / "config.json", self._config)
        _write_json(self._place / "result.json", result)
        _copy_file(self._job.run_dir.log, self._place / "job.log")
        return result, self._warnings

    def _trajectories(self) -> dict[str, StoredEpisode]:
        try:
            episodes = load(self._job.run_dir.path, partial=True, skip_broken=True)
        except TrajectoryFormatError as error:
            self._warnings.append(f"There are no trajectories: {error}")
            return {}
        self._warnings += [f"Left out: {text}" for text in episodes.left_out]
        return {episode.episode_id: episode for episode in episodes}

    def _write_trial(self, result: EpisodeResult, stored: StoredEpisode | None) -> dict[str, Any]:
        """Writes the folder of a trial; returns its `result.json`."""
        name = trial_name(result.task_name, result.episode_id)
        folder = self._place / name
        for inside in (Path(), *(Path(STEPS_FOLDER, stage.name) for stage in result.stages)):
            (folder / inside / AGENT_FOLDER).mkdir(parents=True)
        document = self._trajectory(result, stored)
        if document is not None:
            _write_json(folder / AGENT_FOLDER / TRAJECTORY, document, indent=None)
        for inside in [Path(STEPS_FOLDER, stage.name) for stage in result.stages] or [Path()]:
            for kind in (VERIFIER_FOLDER, ARTIFACTS_FOLDER):
                (folder / inside / kind).mkdir(parents=True)
                if is_file_name(result.episode_id):
                    _copy_tree(self._job.run_dir.files / result.episode_id / inside / kind, folder / inside / kind)
        if (error := trial_error(result)) is not None:
            text = mask_known_secrets(f"{error.type}: {error.message}\n")
            (folder / "exception.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        config = trial_config(self._job, self._config, task=result.task_name, name=name, job_id=self._job_id)
        trial_id, uri = stable_id(self._job.run_id, result.episode_id), (self._uri / name).as_uri()
        data = trial_result(self._job, result, document, config=config, trial_id=trial_id, uri=uri)
        _write_json(folder / "config.json", config)
        _write_json(folder / "result.json", data)
        return data

    def _trajectory(self, result: EpisodeResult, stored: StoredEpisode | None) -> Mapping[str, Any] | None:
        """Returns the trajectory of a trial in ATIF; `None` if it is missing or broken."""
        try:
            return None if stored is None else to_atif(stored.load())[0]
        except TrajectoryFormatError as error:
            self._warnings.append(f"The trajectory of {result.episode_id} is left out: {error}")
            return None


def _write_json(path: Path, data: Mapping[str, Any], *, indent: int | None = 4) -> None:
    path.write_text(dump_json(data, indent=indent), encoding="utf-8")


def _copy_tree(source: Path, target: Path) -> None:
    """Copies the regular files below a folder of the run. Copies nothing if the path contains a link."""
    if source.resolve() != source:
        return
    for directory, _, names in os.walk(source):
        here = target / Path(directory).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in names:
            _copy_file(Path(directory, name), here / name)


def _copy_file(source: Path, target: Path) -> None:
    """Copies a regular file and masks secrets in it."""
    if source.is_symlink() or not source.is_file():
        return
    if source.stat().st_size > MAX_MASKED_BYTES:
        shutil.copyfile(source, target)
        return
    data = source.read_bytes()
    if KnownSecrets().found_in(data):
        data = mask_known_secrets(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    target.write_bytes(data)
