"""The export of a run as a Harbor job: a folder with the documents and files of each trial, written atomically.

In Harbor, a run is a job, and an attempt is a trial. The JSON documents follow the schema of Harbor's models. Config
keys that a run does not have get Harbor's defaults. The records may come from other users, so names and links in them
are checked.

An error has the name of its ares_exp class, which is also Harbor's name if Harbor has the same error. If an attempt
reached its time limit, the trial has Harbor's `AgentTimeoutError`, and may also have a reward. Harbor has no error for
limits on steps, tokens and cost, so `agent_result.metadata` contains the limit. An attempt without a result (cancelled,
closed, lost, abandoned) has a `CancelledError`.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

from ares_exp.config.targets import find_part
from ares_exp.containers.container import ContainerFactoryBase
from ares_exp.environments.scoring.episode_scoring import ARTIFACTS_FOLDER, STEPS_FOLDER, VERIFIER_FOLDER
from ares_exp.errors import ConfigError, TrajectoryFormatError
from ares_exp.records.recorded_results import MAX_COUNT, read_object, read_results
from ares_exp.records.results import UNFINISHED, EpisodeResult, ErrorInfo, Outcome, StageResult, final_results
from ares_exp.records.run_dir import RunDir, appearing, dump_json
from ares_exp.records.secrets import KnownSecrets, mask_known_secrets, scrub
from ares_exp.records.statistics.task_statistics import pass_at_k
from ares_exp.runs.resume.recorded_run import RecordedRun, recorded_config
from ares_exp.tasks.task_files import content_of
from ares_exp.tasks.toml_table import check_step_name, check_unique
from ares_exp.trajectories.exports.atif_writer import to_atif
from ares_exp.trajectories.stored_episodes import StoredEpisode, load

CANCELLED = "CancelledError"
NO_DATASET = "adhoc"
NO_TRACEBACK = "ares_exp records no tracebacks."
_PATH_OF_CLASS = re.compile(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

Json = Mapping[str, Any]
AGENT_FOLDER, TRAJECTORY = "agent", "trajectory.json"
MAX_TASK_CHARS, HASH_CHARS = 32, 7
MAX_MASKED_BYTES = 64 * 2**20
"""Maximum size in bytes of a file in which secrets are masked. Larger files are copied unchanged."""

_NAMESPACE = uuid.UUID("5b0a4c0e-7a0f-5d0c-9a51-5d9f3c1f6a0b")
_FILE_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """The records of a run, which becomes a job of Harbor.

    Attributes:
        config: Composed config, without secrets.
        results: Last result of each attempt that has a result.
        tasks: Selected tasks by name, with their digests if known.
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
        """The recorded id of the run, or the name of its directory if no id is recorded."""
        return str(self.provenance.get("run_id") or self.run_dir.path.name)

    @property
    def times(self) -> tuple[float, float]:
        """The start of the first attempt and the end of the last attempt, in epoch seconds."""
        times = [time for one in self.results for time in (one.started_at, one.finished_at) if time]
        times = times or [self.run_dir.episodes.stat().st_mtime]
        return min(times), max(times)

    def group(self, name: str) -> Mapping[str, Any]:
        """Returns the config of a group, such as `agent`. Empty if the run has no such group."""
        found = self.config.get(name)
        return found if isinstance(found, Mapping) else {}

    def class_name(self, name: str) -> str:
        """Returns the name of the class that a group, such as `policy`, creates."""
        return str(self.group(name).get("_target_", "unknown")).rpartition(".")[2]

    def place(self, task: str) -> tuple[dict[str, str], str | None]:
        """Returns the origin of a task: a Harbor task id (a path, or a git URL with commit and path), and its dataset.

        The dataset is the name of the set of tasks to which the task belongs; `None` if there is no set.
        """
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
    """Reads a run directory. Raises `ConfigError` if it cannot be read."""
    run_dir = RunDir(RecordedRun(path).path.resolve())
    everything = read_results(run_dir.episodes).results
    for result in everything:
        try:  # the names become folder names
            check_unique(check_step_name(stage.name) for stage in result.stages)
        except ValueError as error:
            raise ConfigError(f"{run_dir.episodes}: invalid stages in {result.episode_id!r:.80}: {error}.") from None
    try:
        config = recorded_config(run_dir.path)
    except OSError as error:
        raise ConfigError(f"Cannot read {run_dir.config}: {error.strerror}. The export needs this file.") from None
    provenance, results = read_object(run_dir.provenance), final_results(everything)
    recorded = provenance.get("tasks")
    tasks = {str(name): None for name in recorded} if isinstance(recorded, list) else {}
    tasks |= recorded if isinstance(recorded, dict) else {}
    tasks |= {one.task_name: None for one in results if one.task_name not in tasks}
    each = max(_count(config.get("attempts")), *(1 + one.attempt for one in results), 1)
    planned = _count(read_object(run_dir.summary).get("planned")) or len(tasks) * each
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


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < MAX_COUNT else 0


def _agent(job: RecordedJob) -> dict[str, str]:
    name = str(job.group("agent").get("_target_") or "").rpartition(".")[2].removesuffix("Factory")
    model = job.group("policy").get("model")
    if not isinstance(model, str) or not model:  # the policy itself responds: `oracle`, `scripted`, `replay`
        model = job.class_name("policy").removesuffix("Policy").lower()
    return {"name": name or "unknown", "model_name": model}


def _environment(job: RecordedJob) -> dict[str, str]:
    """Returns the `environment` in Harbor's config: the container backend by its name in Harbor, or by its class.

    If the run used no containers, returns the class of its environment (`env`).
    """
    target = str(job.group("container").get("_target_") or "")
    scored = [one for one in job.results if one.reward is not None]
    if scored and not any(one.container_image for one in scored):
        target = str(job.group("env").get("_target_") or "")
    backend = find_part("container", target)
    if isinstance(backend, type) and issubclass(backend, ContainerFactoryBase) and backend.harbor_name:
        return {"type": backend.harbor_name}
    known = _PATH_OF_CLASS.fullmatch(target) is not None
    return {"import_path": ":".join(target.rsplit(".", 1))} if known else {"type": "docker"}


def _task(job: RecordedJob, task: str) -> dict[str, str]:
    place, source = job.place(task)
    return place if source is None else {**place, "source": source}


def trial_error(result: EpisodeResult) -> ErrorInfo | None:
    """Returns the error of the trial for a result; `None` if the trial has no error in Harbor."""
    if result.outcome in UNFINISHED:
        why = "no result" if result.error is None else result.error.message
        return ErrorInfo(CANCELLED, f"{result.outcome.value}: {why}")
    if result.outcome is Outcome.TRUNCATED:
        return None if result.stages else _timeout_error(result.limit)
    return result.error


def _timeout_error(limit: str | None) -> ErrorInfo | None:
    return ErrorInfo("AgentTimeoutError", "The agent reached its time limit.") if limit == "time" else None


def trial_result(
    job: RecordedJob, result: EpisodeResult, trajectory: Json | None, *, config: Json, trial_id: str, uri: str
) -> dict[str, Any]:
    """Returns the content of a trial's `result.json`, with all keys that Harbor writes, including null values.

    `trajectory` is the trajectory in ATIF, Harbor's format.
    """
    provider, slash, model = config["agent"]["model_name"].partition("/")
    place, source = job.place(result.task_name)
    digest = job.tasks[result.task_name]
    known = _DIGEST.fullmatch(content_of(digest if isinstance(digest, str) else None) or "")
    return {
        "id": trial_id,
        "task_name": result.task_name,
        "trial_name": config["trial_name"],
        "trial_uri": uri,
        "task_id": place,
        "source": source,
        "task_checksum": known[1] if known else "",
        "config": config,
        "agent_info": {
            "name": config["agent"]["name"],
            "version": str(job.provenance.get("ares_exp_version") or "unknown"),
            "model_info": {"name": model if slash else provider, "provider": provider if slash else None},
        },
        "agent_result": _context(result, trajectory),
        "verifier_result": _rewards(result),
        "verifier_environment_mode": None,
        "exception_info": _exception(trial_error(result), result.finished_at),
        "started_at": _utc(result.started_at),
        "finished_at": _utc(result.finished_at),
        "environment_setup": None,
        "agent_setup": None,
        "agent_execution": None,
        "verifier": None,
        "step_results": [_step(stage, result) for stage in result.stages] or None,
    }


def _exception(error: ErrorInfo | None, occurred_at: float) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "exception_type": error.type,
        "exception_message": error.message,
        "exception_traceback": NO_TRACEBACK,
        "occurred_at": _utc(occurred_at) or _utc(1.0),
    }


def _step(stage: StageResult, result: EpisodeResult) -> dict[str, Any]:
    return {
        "step_name": stage.name,
        "agent_result": None,
        "verifier_result": _rewards(stage),
        "exception_info": _exception(_timeout_error(stage.truncated_by), result.finished_at),
        "agent_execution": None,
        "verifier": None,
    }


def _context(result: EpisodeResult, trajectory: Json | None) -> dict[str, Any]:
    """Returns the `agent_result` of a trial: token counts, cost and token ids.

    `metadata` contains values of ares_exp for which Harbor has no key.
    """
    names = ("episode_id", "attempt", "retry", "seed", "container_image", "num_steps")
    kept = {name: getattr(result, name) for name in names}
    truncated_by = result.limit if result.outcome is Outcome.TRUNCATED else None
    kept |= {"outcome": result.outcome.value, "truncated_by": truncated_by}
    return {
        "n_input_tokens": result.prompt_tokens,
        "n_cache_tokens": None,
        "n_output_tokens": result.generated_tokens,
        "cost_usd": result.cost,
        "model_usage": None,
        "rollout_details": _rollout_details(trajectory) if trajectory is not None else None,
        "metadata": {"ares_exp": kept},
    }


def _rollout_details(document: Json) -> list[dict[str, Any]] | None:
    """Returns the token ids and log-probabilities of all LLM calls of a trajectory in ATIF.

    A field is left out if any call lacks it. Returns `None` if any call lacks the token ids of its completion.
    """
    turns = [step["metrics"] for step in document["steps"] if "metrics" in step]
    names = ("prompt_token_ids", "completion_token_ids", "logprobs")
    details = {name: [turn[name] for turn in turns] for name in names if all(turn.get(name) for turn in turns)}
    return [details] if turns and "completion_token_ids" in details else None


def _rewards(result: EpisodeResult | StageResult) -> dict[str, Any] | None:
    return None if result.reward is None else {"rewards": dict(result.rewards) or {"reward": result.reward}}


def job_result(job: RecordedJob, trials: Sequence[Json], *, job_id: str) -> dict[str, Any]:
    """Returns the content of the job's `result.json`. Until all attempts have results, `finished_at` is null."""
    started_at, updated_at = (_at(time, None) or _at(0, None) for time in job.times)  # local times, like Harbor
    is_finished = sum(one.outcome not in UNFINISHED for one in job.results) >= job.planned
    groups: defaultdict[str, list[Json]] = defaultdict(list)
    for trial in trials:
        info = trial["agent_info"]
        key = (info["name"], info["model_info"]["name"], trial["source"] or NO_DATASET)
        groups["__".join(filter(None, key))].append(trial)
    errors = [one["exception_info"]["exception_type"] for one in trials if one["exception_info"] is not None]
    totals = {}
    for name in ("n_input_tokens", "n_cache_tokens", "n_output_tokens", "cost_usd"):
        known = [one["agent_result"][name] for one in trials if one["agent_result"][name] is not None]
        totals[name] = sum(known) if known else None
    return {
        "id": job_id,
        "started_at": started_at,
        "updated_at": updated_at,
        "finished_at": updated_at if is_finished else None,
        "n_total_trials": job.planned,
        "stats": {
            "n_completed_trials": len(trials),
            "n_errored_trials": len(errors),
            "n_running_trials": 0,
            "n_pending_trials": job.planned - len(trials),
            "n_cancelled_trials": sum(
                (one["exception_info"] or {}).get("exception_type") == CANCELLED for one in trials
            ),
            "n_retries": job.num_retries,
            "evals": {key: _eval(group) for key, group in groups.items()},
            **totals,
        },
    }


def mean_rewards(rewards: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Returns the mean rewards of trials, as Harbor's metric `mean` computes them. A missing reward counts as 0.

    If the rewards have at most one key, the result has the key `mean`. Otherwise, it has the mean of each key.
    """
    keys = sorted({key for one in rewards for key in one or ()})
    if len(keys) <= 1:
        return {"mean": sum(next(iter((one or {}).values()), 0) for one in rewards) / len(rewards)}
    return {key: sum((one or {}).get(key, 0) for one in rewards) / len(rewards) for key in keys}


def pass_rates(successes: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    """Returns the mean pass@k over tasks, for each `k` above 1 that is a power of two or a multiple of five.

    `successes` contains, for each task, whether each attempt passed. `k` is at most the smallest number of attempts.
    """
    most = min(map(len, successes.values()), default=0)
    powers = {2**exponent for exponent in range(1, most.bit_length())}
    numbers = sorted(k for k in {*powers, *range(5, most + 1, 5)} if k <= most)
    return {
        str(k): sum(pass_at_k(len(each), sum(each), k) for each in successes.values()) / len(successes) for k in numbers
    }


def _eval(trials: Sequence[Json]) -> dict[str, Any]:
    rewards = [one["verifier_result"] and one["verifier_result"]["rewards"] for one in trials]
    by_reward: defaultdict[str, defaultdict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    by_exception: defaultdict[str, list[str]] = defaultdict(list)
    successes: defaultdict[str, list[bool]] = defaultdict(list)
    binary = True
    for trial, given in zip(trials, rewards, strict=True):
        for key, value in (given or {}).items():
            by_reward[key][value].append(trial["trial_name"])
        if trial["exception_info"] is not None:
            by_exception[trial["exception_info"]["exception_type"]].append(trial["trial_name"])
        values = [0] if given is None else list(given.values())
        binary &= len(values) == 1 and values[0] in (0, 1)
        successes[trial["task_name"]].append(values[:1] == [1])
    return {
        "n_trials": sum(one is not None for one in rewards),
        "n_errors": sum(map(len, by_exception.values())),
        "metrics": [mean_rewards(rewards)],
        # Empty unless every reward has one key and is 0 or 1. A missing reward counts as a failure.
        "pass_at_k": pass_rates(successes) if binary else {},
        "reward_stats": by_reward,
        "exception_stats": by_exception,
    }


def _utc(seconds: float) -> str | None:
    """Formats epoch seconds in UTC as ISO 8601. Returns `None` for 0 (unknown) and for invalid values."""
    text = _at(seconds, UTC) if seconds > 0 else None
    return text and text.replace("+00:00", "Z")


def _at(seconds: float, zone: tzinfo | None) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, zone).isoformat()
    except (ValueError, OverflowError, OSError):
        return None


def write_job(job: RecordedJob, jobs_dir: Path, name: str) -> tuple[Mapping[str, Any], list[str]]:
    """Writes the job to the folder `<jobs_dir>/<name>`. Returns the content of its `result.json`, and warnings.

    Raises `ConfigError` if writing fails. The folder appears only when it is complete.
    """
    try:
        with appearing(jobs_dir / name) as place:
            return _Writer(job, place, jobs_dir.resolve(), name).write()
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"Cannot write {jobs_dir / name}: {what}{error.strerror or error}.") from None


def is_file_name(text: str) -> bool:
    """Returns whether a text from a record is a safe file name, which cannot lead to another folder."""
    return _FILE_NAME.fullmatch(text) is not None


def trial_name(task_name: str, episode_id: str) -> str:
    """Returns the name of a trial: `<task>__<7 characters>`, from the task's name and a hash of the episode's id."""
    head = re.sub(r"[^A-Za-z0-9._-]", "-", task_name.split("/")[-1])
    digest = hashlib.sha256(episode_id.encode(errors="backslashreplace")).hexdigest()
    return f"{head[:MAX_TASK_CHARS].lstrip('.').rstrip('_-') or 'task'}__{digest[:HASH_CHARS]}"


def stable_id(*parts: str) -> str:
    """Derives a UUID from the parts. The same parts always give the same UUID, so that exports can be repeated."""
    return str(uuid.uuid5(_NAMESPACE, "/".join(parts).encode(errors="backslashreplace").decode()))


class _Writer:
    def __init__(self, job: RecordedJob, place: Path, jobs_dir: Path, name: str) -> None:
        """Prepares an export to the temporary folder `place`, which the caller renames to `<jobs_dir>/<name>`."""
        self._job, self._place, self._uri = job, place, jobs_dir / name
        self._job_id = stable_id(job.run_id)
        self._config: dict[str, Any] = {
            "job_name": name,
            "jobs_dir": str(jobs_dir),
            "n_attempts": job.attempts_each,
            "environment": _environment(job),
            "agents": [_agent(job)],
            "tasks": [_task(job, task) for task in job.tasks],
        }
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
            self._warnings.append(f"The export has no trajectories, because they cannot be read: {error}")
            return {}
        self._warnings += [f"Left out: {text}" for text in episodes.left_out]
        return {episode.episode_id: episode for episode in episodes}

    def _write_trial(self, result: EpisodeResult, stored: StoredEpisode | None) -> dict[str, Any]:
        """Writes the folder of a trial. Returns the content of its `result.json`."""
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
        config = {
            "task": _task(self._job, result.task_name),
            "trial_name": name,
            "trials_dir": f"{self._config['jobs_dir']}/{self._config['job_name']}",
            "environment": self._config["environment"],
            "agent": self._config["agents"][0],
            "job_id": self._job_id,
        }
        trial_id, uri = stable_id(self._job.run_id, result.episode_id), (self._uri / name).as_uri()
        data = trial_result(self._job, result, document, config=config, trial_id=trial_id, uri=uri)
        _write_json(folder / "config.json", config)
        _write_json(folder / "result.json", data)
        return data

    def _trajectory(self, result: EpisodeResult, stored: StoredEpisode | None) -> Mapping[str, Any] | None:
        """Returns a trial's trajectory in ATIF; `None` if it is missing or, after a warning, if it is broken."""
        try:
            return None if stored is None else to_atif(stored.load())[0]
        except TrajectoryFormatError as error:
            self._warnings.append(f"The trajectory of {result.episode_id} is left out: {error}")
            return None


def _write_json(path: Path, data: Mapping[str, Any], *, indent: int | None = 4) -> None:
    path.write_text(dump_json(data, indent=indent), encoding="utf-8")


def _copy_tree(source: Path, target: Path) -> None:
    """Copies the regular files below a folder of the run. Copies nothing if a part of the folder's path is a link."""
    if source.resolve() != source:
        return
    for directory, _, names in os.walk(source):
        here = target / Path(directory).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in names:
            _copy_file(Path(directory, name), here / name)


def _copy_file(source: Path, target: Path) -> None:
    """Copies a file, and masks secrets in it. Ignores links and other files that are not regular."""
    if source.is_symlink() or not source.is_file():
        return
    if source.stat().st_size > MAX_MASKED_BYTES:
        shutil.copyfile(source, target)
        return
    data = source.read_bytes()
    if KnownSecrets().found_in(data):
        data = mask_known_secrets(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    target.write_bytes(data)
