"""The records of a run, as an export reads them: every attempt by its last retry. All of it is untrusted input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.config.hydra_setup import HYDRA_RECORDS
from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_json_object, read_yaml
from ares_exp.records.recorded_results import MAX_COUNT, read_results
from ares_exp.records.results import UNFINISHED, EpisodeResult, final_results
from ares_exp.records.run_dir import RunDir
from ares_exp.records.secrets import scrub
from ares_exp.runs.resume.recorded_run import RecordedRun, recorded_config
from ares_exp.tasks.step_name import check_step_name, check_unique


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A run.

    Attributes:
        run_dir: Its directory.
        config: As it was composed, without secrets.
        provenance: As recorded; empty where it is missing.
        choices: The options that were chosen, by group; empty where that was not recorded.
        results: The last result of every attempt that has one.
        tasks: The selected ones, each with its digest where that is known.
        attempts_each: Number of attempts at each task.
        planned: Attempts that were asked for.
        num_retries: Playings that failed and were followed by another one.
    """

    run_dir: RunDir
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    choices: Mapping[str, str]
    results: tuple[EpisodeResult, ...]
    tasks: Mapping[str, str | None]
    attempts_each: int
    planned: int
    num_retries: int

    @property
    def run_id(self) -> str:
        """Of the run; the name of its directory where it was not recorded."""
        return str(self.provenance.get("run_id") or self.run_dir.path.name)

    @property
    def is_finished(self) -> bool:
        """Whether every attempt that was asked for has a result, be it an error."""
        return sum(one.outcome not in UNFINISHED for one in self.results) >= self.planned

    @property
    def times(self) -> tuple[float, float]:
        """When the first attempt started and the last one ended, epoch seconds."""
        times = [time for one in self.results for time in (one.started_at, one.finished_at) if time]
        times = times or [self.run_dir.episodes.stat().st_mtime]
        return min(times), max(times)

    def group(self, name: str) -> Mapping[str, Any]:
        """Returns the config of a group; empty where there is none."""
        found = self.config.get(name)
        return found if isinstance(found, Mapping) else {}

    def option(self, name: str) -> str:
        """Returns the option that was chosen for a group, or else the name of its class."""
        return str(self.choices.get(name) or str(self.group(name).get("_target_", "unknown")).rpartition(".")[2])


def read_job(path: Path) -> RecordedJob:
    """Reads a run directory.

    Raises:
        ConfigError: It is none, or cannot be read.
    """
    run_dir = RunDir(RecordedRun(path).path.resolve())
    everything = read_results(run_dir.episodes).results
    for result in everything:
        try:  # they become names of folders
            check_unique(check_step_name(stage.name) for stage in result.stages)
        except ValueError as error:
            raise ConfigError(f"{run_dir.episodes}: the stages of {result.episode_id!r:.80}: {error}.") from None
    try:
        config = recorded_config(run_dir.path)
    except OSError as error:
        raise ConfigError(f"Cannot read {run_dir.config}: {error.strerror}. An export needs it.") from None
    provenance, results = _json(run_dir.provenance), final_results(everything)
    tasks = _tasks(provenance, results)
    each = max(_count(config.get("attempts")), *(1 + one.attempt for one in results), 1)
    planned = _count(_json(run_dir.summary).get("planned")) or len(tasks) * each
    final = {one.episode_id for one in results}
    return RecordedJob(
        run_dir=run_dir,
        config=scrub(config),
        provenance=provenance,
        choices=_choices(run_dir),
        results=results,
        tasks=tasks,
        attempts_each=each,
        planned=max(planned, len(results)),
        num_retries=sum(one.outcome not in UNFINISHED for one in everything if one.episode_id not in final),
    )


def _tasks(provenance: Mapping[str, Any], results: Sequence[EpisodeResult]) -> dict[str, str | None]:
    """The recorded selection; without it, the tasks that were played."""
    recorded = provenance.get("tasks")
    digests: Mapping[str, Any] = recorded if isinstance(recorded, dict) else {}
    names = [*(recorded if isinstance(recorded, dict | list) else ()), *(one.task_name for one in results)]
    found = {str(name): digests.get(name) for name in names}
    return {name: digest if isinstance(digest, str) else None for name, digest in found.items()}


def _choices(run_dir: RunDir) -> dict[str, str]:
    try:
        chosen = read_yaml(run_dir.path / HYDRA_RECORDS / "hydra.yaml")["hydra"]["runtime"]["choices"]
        return {str(group): option for group, option in chosen.items() if isinstance(option, str)}
    except (OSError, ConfigError, KeyError, TypeError, AttributeError):
        return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < MAX_COUNT else 0
