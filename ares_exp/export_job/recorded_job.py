"""What a run recorded, as an export sees it: every attempt by its last try. All of it is untrusted input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.answer_log import logged_episodes
from ares_exp.errors import ConfigError
from ares_exp.hydra_resolvers import HYDRA_RECORDS
from ares_exp.record_files import broken, read_json_object, read_record, read_yaml
from ares_exp.recorded_results import MAX_COUNT, read_results
from ares_exp.recorded_run import RecordedRun
from ares_exp.results import UNFINISHED, EpisodeResult, final_results
from ares_exp.run_dir import RunDir
from ares_exp.secrets import scrub
from ares_exp.tasks.step_name import check_step_name, check_unique


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a task that was begun.

    Attributes:
        episode_id, task_name, attempt: Of its last try.
        started_at: Epoch seconds.
        result: What came of it; `None`: it is under way, or its process was killed.
    """

    episode_id: str
    task_name: str
    attempt: int
    started_at: float
    result: EpisodeResult | None


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A run.

    Attributes:
        run_dir: Its directory.
        config: As it was composed, without secrets.
        provenance: As recorded; empty where it is missing.
        choices: The options that were chosen, by group; empty where that was not recorded.
        attempts: All that were begun.
        tasks: What was selected, each with its digest where that is known.
        attempts_each: How often each task was to be played.
        planned: Attempts that were asked for.
        num_retries: Tries that failed and were followed by another one.
        started_at, updated_at: Epoch seconds.
    """

    run_dir: RunDir
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    choices: Mapping[str, str]
    attempts: tuple[Attempt, ...]
    tasks: Mapping[str, str | None]
    attempts_each: int
    planned: int
    num_retries: int
    started_at: float
    updated_at: float

    @property
    def run_id(self) -> str:
        """Of the run; the name of its directory where it was not recorded."""
        return str(self.provenance.get("run_id") or self.run_dir.path.name)

    @property
    def is_finished(self) -> bool:
        """Whether every attempt that was asked for has a result, be it an error."""
        done = [one for one in self.attempts if one.result is not None and one.result.outcome not in UNFINISHED]
        return len(done) >= self.planned

    def group(self, name: str) -> Mapping[str, Any]:
        """The config of a group; empty where there is none."""
        found = self.config.get(name)
        return found if isinstance(found, Mapping) else {}

    def option(self, name: str) -> str:
        """What was chosen for a group: the option's name, or else that of its class."""
        return str(self.choices.get(name) or str(self.group(name).get("_target_", "unknown")).rpartition(".")[2])


def read_job(path: Path) -> RecordedJob:
    """Reads a run directory.

    Raises:
        ConfigError: It is none, or cannot be read.
    """
    run_dir = RunDir(RecordedRun(path).path)
    results = read_results(run_dir.episodes).results
    for result in results:
        _check_stages(run_dir, result)
    config = _yaml(run_dir.config)
    if not isinstance(config, dict):
        raise broken(run_dir.config, "a config", f"a {type(config).__name__}")
    provenance, sessions = _json(run_dir.provenance), _sessions(run_dir.sessions)
    attempts = _last_tries(run_dir, results)
    final = {one.episode_id for one in attempts}
    superseded = [one for one in results if one.episode_id not in final]
    tasks = _tasks(provenance, attempts)
    asked = [config.get("attempts"), *(line.get("attempts") for line in sessions), 1]
    each = max(*(_count(one) for one in asked), *(1 + one.attempt for one in attempts))
    planned = _count(_json(run_dir.summary).get("planned")) or len(tasks) * each
    starts = [one for one in (_time(line.get("began")) for line in sessions) if one]
    starts = starts or [one.started_at for one in attempts if one.started_at] or [run_dir.episodes.stat().st_mtime]
    ends = [_time(line.get("ended")) for line in sessions] + [one.finished_at for one in results]
    return RecordedJob(
        run_dir=run_dir,
        config=scrub(config),
        provenance=provenance,
        choices=_choices(run_dir),
        attempts=attempts,
        tasks=tasks,
        attempts_each=each,
        planned=max(planned, len(attempts)),
        num_retries=sum(one.outcome not in UNFINISHED for one in superseded),
        started_at=min(starts),
        updated_at=max([*ends, min(starts)]),
    )


def _last_tries(run_dir: RunDir, results: Sequence[EpisodeResult]) -> tuple[Attempt, ...]:
    """The last try of every attempt; of one that has no row yet its log tells."""
    last = {
        (one.task_name, one.attempt): (one.retry, Attempt(one.episode_id, *_slot(one), one.started_at, one))
        for one in final_results(results)
    }
    ended = {one.episode_id for one in results}
    for log in logged_episodes(run_dir.answers):
        before = last.get(log.slot)
        if log.has_begun and log.episode_id not in ended and (before is None or log.retry > before[0]):
            last[log.slot] = log.retry, Attempt(log.episode_id, *log.slot, log.started_at, None)
    return tuple(attempt for _, attempt in last.values())


def _check_stages(run_dir: RunDir, result: EpisodeResult) -> None:
    """Refuses names of stages that could not be those of folders."""
    try:
        check_unique(check_step_name(stage.name) for stage in result.stages)
    except ValueError as error:
        raise ConfigError(f"{run_dir.episodes}: the stages of {result.episode_id!r:.80}: {error}.") from None


def _slot(result: EpisodeResult) -> tuple[str, int]:
    return result.task_name, result.attempt


def _tasks(provenance: Mapping[str, Any], attempts: Sequence[Attempt]) -> dict[str, str | None]:
    """The recorded selection; without it, the tasks that were played."""
    recorded = provenance.get("tasks")
    if isinstance(recorded, list):
        recorded = dict.fromkeys(map(str, recorded))
    found: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    found = {**found, **{one.task_name: None for one in attempts if one.task_name not in found}}
    return {str(name): digest if isinstance(digest, str) else None for name, digest in found.items()}


def _choices(run_dir: RunDir) -> dict[str, str]:
    try:
        chosen = read_yaml(run_dir.path / HYDRA_RECORDS / "hydra.yaml")["hydra"]["runtime"]["choices"]
        return {str(group): option for group, option in chosen.items() if isinstance(option, str)}
    except (OSError, ConfigError, KeyError, TypeError, AttributeError):
        return {}


def _sessions(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    with suppress(OSError, ConfigError):  # a merged run has none of its own
        for text in read_record(path).splitlines():
            with suppress(ValueError, RecursionError):  # a torn line is no use
                line = json.loads(text)
                lines += [line] if isinstance(line, dict) else []
    return lines


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None


def _yaml(path: Path) -> Any:
    try:
        return read_yaml(path)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}. Without it nobody knows what was played.") from None


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < MAX_COUNT else 0


def _time(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < MAX_COUNT else 0.0
