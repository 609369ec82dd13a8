"""The records of a run for an export, with the last retry of every attempt. All records are untrusted input."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_json_object
from ares_exp.records.recorded_results import MAX_COUNT, read_results
from ares_exp.records.results import UNFINISHED, EpisodeResult, final_results
from ares_exp.records.run_dir import RunDir
from ares_exp.records.secrets import scrub
from ares_exp.runs.resume.recorded_run import RecordedRun, recorded_config
from ares_exp.tasks.toml_table import check_step_name, check_unique


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """The records of a run.

    Attributes:
        run_dir: Run directory.
        config: Composed config, without secrets.
        provenance: Recorded provenance; empty if it is missing.
        results: Last result of every attempt with a result.
        tasks: Selected tasks, with their digests if known.
        attempts_each: Number of attempts at each task.
        planned: Number of attempts of the run.
        num_retries: Number of failed episodes that were retried.
    """

    run_dir: RunDir
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    results: tuple[EpisodeResult, ...]
    tasks: Mapping[str, Any]
    attempts_each: int
    planned: int
    num_retries: int

    @property
    def run_id(self) -> str:
        """The recorded id of the run; defaults to the name of its directory."""
        return str(self.provenance.get("run_id") or self.run_dir.path.name)

    @property
    def times(self) -> tuple[float, float]:
        """The start of the first attempt and the end of the last attempt, in epoch seconds."""
        times = [time for one in self.results for time in (one.started_at, one.finished_at) if time]
        times = times or [self.run_dir.episodes.stat().st_mtime]
        return min(times), max(times)

    def group(self, name: str) -> Mapping[str, Any]:
        """Returns the config of a group; empty if it is missing."""
        found = self.config.get(name)
        return found if isinstance(found, Mapping) else {}

    def class_name(self, name: str) -> str:
        """Returns the name of the class of a group's option."""
        return str(self.group(name).get("_target_", "unknown")).rpartition(".")[2]

    def place(self, task: str) -> tuple[dict[str, str], str | None]:
        """Returns the location of a task as a Harbor task id, and its task set (`None` for a single task)."""
        from ares_exp.tasks.task_set import SAMPLES

        env, origins = self.group("env"), self.provenance.get("task_origins")
        if not str(env.get("_target_")).endswith(".HarborEnvironments"):
            return {"path": task}, self.class_name("env")
        dataset = None if env.get("dataset") is None else str(env["dataset"]).partition("@")[0]
        origin: Any = origins.get(task) if isinstance(origins, Mapping) else None
        if isinstance(origin, Mapping):
            url, commit, path = (str(origin.get(key)) for key in ("git_url", "git_commit", "path"))
            if dataset is None and env.get("repo") is not None:  # Harbor uses the folder's address as its name
                address = url.rpartition("://")[2].removesuffix(".git")
                dataset = f"{address}/tree/{commit}/{posixpath.dirname(path) or '.'}"
            return {"git_url": url, "git_commit_id": commit, "path": path}, dataset
        if dataset is not None:
            return {"path": task}, dataset
        given, start = env.get("path"), Path(str(self.provenance.get("cwd") or "."))
        root = SAMPLES if given is None else start.joinpath(str(given)).expanduser().resolve()
        is_task = root.name == task and len(self.tasks) == 1 and not (root / task).is_dir()
        return ({"path": str(root)}, None) if is_task else ({"path": str(root / task)}, root.name)


def read_job(path: Path) -> RecordedJob:
    """Reads a run directory.

    Raises:
        ConfigError: The path is not a run directory or cannot be read.
    """
    run_dir = RunDir(RecordedRun(path).path.resolve())
    everything = read_results(run_dir.episodes).results
    for result in everything:
        try:  # the names become folder names
            check_unique(check_step_name(stage.name) for stage in result.stages)
        except ValueError as error:
            raise ConfigError(f"{run_dir.episodes}: the stages of {result.episode_id!r:.80}: {error}.") from None
    try:
        config = recorded_config(run_dir.path)
    except OSError as error:
        raise ConfigError(f"Cannot read {run_dir.config}: {error.strerror}. An export needs it.") from None
    provenance, results = _json(run_dir.provenance), final_results(everything)
    recorded = provenance.get("tasks")
    tasks = {str(name): None for name in recorded} if isinstance(recorded, list) else {}
    tasks |= recorded if isinstance(recorded, dict) else {}
    tasks |= {one.task_name: None for one in results if one.task_name not in tasks}
    each = max(_count(config.get("attempts")), *(1 + one.attempt for one in results), 1)
    planned = _count(_json(run_dir.summary).get("planned")) or len(tasks) * each
    final = {one.episode_id for one in results}
    return RecordedJob(
        run_dir=run_dir,
        config=scrub(config),
        provenance=provenance,
        results=results,
        tasks=tasks,
        attempts_each=each,
        planned=max(planned, len(results)),
        num_retries=sum(one.outcome not in UNFINISHED for one in everything if one.episode_id not in final),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < MAX_COUNT else 0
