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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ares_exp.config.targets import find_part
from ares_exp.containers.container import ContainerFactoryBase
from ares_exp.environments.scoring.episode_scoring import ARTIFACTS_FOLDER, STEPS_FOLDER, VERIFIER_FOLDER
from ares_exp.errors import ConfigError
from ares_exp.records.recorded_results import is_count, read_object, recorded_summary
from ares_exp.records.results import UNFINISHED, EpisodeResult, ErrorInfo, Outcome, RunSummary, StageResult
from ares_exp.records.run_dir import RunDir, appearing, dump_json
from ares_exp.records.secrets import KnownSecrets, mask_known_secrets, scrub
from ares_exp.records.statistics.run_statistics import pass_at_k
from ares_exp.runs.resume.recorded_run import RecordedRun, recorded_config
from ares_exp.tasks.task_files import content_of
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.tasks.task_toml import check_step_name, check_unique
from ares_exp.trajectories.collectors import SAFE_NAME
from ares_exp.trajectories.exports.atif_writer import iso_8601, to_atif
from ares_exp.trajectories.records import EpisodeTrajectory

CANCELLED = "CancelledError"
TIMEOUT = ErrorInfo("AgentTimeoutError", "The agent reached its time limit.")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

Json = Mapping[str, Any]
MAX_TASK_CHARS, HASH_CHARS = 32, 7
MAX_MASKED_BYTES = 64 * 2**20
"""Maximum size in bytes of a file in which secrets are masked. Larger files are copied unchanged."""

_WITHOUT_VALUE = ("verifier_environment_mode", "environment_setup", "agent_setup", "agent_execution", "verifier")
"""Keys of a trial in Harbor for which a run has no values."""
_NAMESPACE = uuid.UUID("5b0a4c0e-7a0f-5d0c-9a51-5d9f3c1f6a0b")


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """The records of a run, which becomes a job of Harbor.

    Attributes:
        config: Composed config, without secrets.
        summary: Results of all episodes, and the number of planned attempts.
        tasks: Selected tasks by name, with their digests if known.
    """

    run_dir: RunDir
    config: Json
    provenance: Json
    summary: RunSummary
    tasks: Json

    @property
    def run_id(self) -> str:
        """The recorded id of the run, or the name of its directory if no id is recorded."""
        return str(self.provenance.get("run_id") or self.run_dir.path.name)

    def group(self, name: str) -> Json:
        """Returns the config of a group, such as `agent`. Empty if the run has no such group."""
        found = self.config.get(name)
        return found if isinstance(found, Mapping) else {}

    def class_name(self, name: str) -> str:
        """Returns the name of the class that a group, such as `policy`, creates."""
        return str(self.group(name).get("_target_") or "unknown").rpartition(".")[2]

    def agent(self) -> dict[str, str]:
        """Returns the agent and the model in Harbor's config."""
        model = self.group("policy").get("model")
        if not isinstance(model, str) or not model:  # the policy itself responds: `oracle`, `scripted`, `replay`
            model = self.class_name("policy").removesuffix("Policy").lower()
        return {"name": self.class_name("agent").removesuffix("Factory"), "model_name": model}

    def environment(self) -> dict[str, str]:
        """Returns the `environment` in Harbor's config: the container backend by its name in Harbor, or by its class.

        If the run used no containers, returns the class of its environment (`env`).
        """
        images = [one.container_image for one in self.summary.scored]
        target = str(self.group("env" if images and not any(images) else "container").get("_target_") or "")
        backend = find_part("container", target)
        if isinstance(backend, type) and issubclass(backend, ContainerFactoryBase) and backend.harbor_name:
            return {"type": backend.harbor_name}
        module, _, name = target.rpartition(".")
        return {"import_path": f"{module}:{name}"} if module else {"type": "docker"}

    def task(self, name: str) -> dict[str, str]:
        """Returns the origin of a task in Harbor's config: a path, or a git URL with commit and path.

        `source` is the name of the set of tasks to which the task belongs. It is missing if there is no set.
        """
        env, origins = self.group("env"), self.provenance.get("task_origins")
        if not str(env.get("_target_")).endswith(".HarborEnvironments"):
            return {"path": name, "source": self.class_name("env")}
        source = {} if env.get("dataset") is None else {"source": str(env["dataset"]).partition("@")[0]}
        origin: Any = origins.get(name) if isinstance(origins, Mapping) else None
        if isinstance(origin, Mapping):
            url, commit, path = (str(origin.get(key)) for key in ("git_url", "git_commit", "path"))
            if not source and env.get("repo") is not None:  # Harbor uses the folder's address as its name
                address = url.rpartition("://")[2].removesuffix(".git")
                source = {"source": f"{address}/tree/{commit}/{posixpath.dirname(path) or '.'}"}
            return {"git_url": url, "git_commit_id": commit, "path": path, **source}
        if source:
            return {"path": name, **source}
        start = Path(str(self.provenance.get("cwd") or "."))
        root = SAMPLES if env.get("path") is None else start.joinpath(str(env["path"])).expanduser().resolve()
        if root.name == name and len(self.tasks) == 1 and not (root / name).is_dir():
            return {"path": str(root)}
        return {"path": str(root / name), "source": root.name}


def read_job(path: Path) -> RecordedJob:
    """Reads a run directory. Raises `ConfigError` if it cannot be read."""
    run_dir = RunDir(RecordedRun(path).path.resolve())
    try:
        config = recorded_config(run_dir.path)
    except OSError as error:
        raise ConfigError(f"Cannot read {run_dir.config}: {error.strerror}. The export needs this file.") from None
    summary, provenance = recorded_summary(run_dir), read_object(run_dir.provenance)
    assert summary is not None, "the run has a config"
    for result in summary.results:
        try:  # the names become folder names
            check_unique(check_step_name(stage.name) for stage in result.stages)
        except ValueError as error:
            raise ConfigError(f"{run_dir.episodes}: invalid stages in {result.episode_id!r:.80}: {error}.") from None
    recorded = provenance.get("tasks")
    tasks = recorded if isinstance(recorded, dict) else {}
    tasks = tasks | {one.task_name: None for one in summary.final if one.task_name not in tasks}
    return RecordedJob(run_dir, scrub(config), provenance, summary, tasks)


def trial_error(result: EpisodeResult) -> ErrorInfo | None:
    """Returns the error of the trial for a result; `None` if the trial has no error in Harbor."""
    if result.outcome in UNFINISHED:
        why = "no result" if result.error is None else result.error.message
        return ErrorInfo(CANCELLED, f"{result.outcome.value}: {why}")
    if result.outcome is Outcome.TRUNCATED:
        return TIMEOUT if result.limit == "time" and not result.stages else None
    return result.error


def trial_result(job: RecordedJob, result: EpisodeResult, config: Json, rollouts: Sequence[Json] | None) -> Json:
    """Returns the content of a trial's `result.json`, with all keys that Harbor writes, including null values."""
    provider, slash, model = config["agent"]["model_name"].partition("/")
    names = ("episode_id", "attempt", "retry", "seed", "container_image", "num_steps")
    kept = {name: getattr(result, name) for name in names}
    truncated_by = result.limit if result.outcome is Outcome.TRUNCATED else None
    digest = _DIGEST.fullmatch(str(content_of(job.tasks[result.task_name])))
    return {
        "id": stable_id(job.run_id, result.episode_id),
        "task_name": result.task_name,
        "trial_name": config["trial_name"],
        "trial_uri": Path(config["trials_dir"], config["trial_name"]).as_uri(),
        "task_id": {key: value for key, value in config["task"].items() if key != "source"},
        "source": config["task"].get("source"),
        "task_checksum": digest[1] if digest else "",
        "config": config,
        "agent_info": {
            "name": config["agent"]["name"],
            "version": str(job.provenance.get("ares_exp_version") or "unknown"),
            "model_info": {"name": model if slash else provider, "provider": provider if slash else None},
        },
        "agent_result": {
            "n_input_tokens": result.prompt_tokens,
            "n_cache_tokens": None,
            "n_output_tokens": result.generated_tokens,
            "cost_usd": result.cost,
            "model_usage": None,
            "rollout_details": rollouts,
            "metadata": {"ares_exp": {**kept, "outcome": result.outcome.value, "truncated_by": truncated_by}},
        },
        "verifier_result": _rewards(result),
        "exception_info": _exception(trial_error(result), result.finished_at),
        "started_at": _utc(result.started_at),
        "finished_at": _utc(result.finished_at),
        "step_results": [_step(stage, result) for stage in result.stages] or None,
        **dict.fromkeys(_WITHOUT_VALUE),
    }


def _exception(error: ErrorInfo | None, occurred_at: float) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "exception_type": error.type,
        "exception_message": error.message,
        "exception_traceback": "ares_exp records no tracebacks.",
        "occurred_at": _utc(occurred_at) or _utc(1.0),
    }


def _step(stage: StageResult, result: EpisodeResult) -> dict[str, Any]:
    return {
        "step_name": stage.name,
        "verifier_result": _rewards(stage),
        "exception_info": _exception(TIMEOUT if stage.truncated_by == "time" else None, result.finished_at),
        **dict.fromkeys(("agent_result", "agent_execution", "verifier")),
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


def job_result(job: RecordedJob, trials: Sequence[Json]) -> dict[str, Any]:
    """Returns the content of the job's `result.json`. Until all attempts have results, `finished_at` is null."""
    summary = job.summary
    times = [time for one in summary.final for time in (one.started_at, one.finished_at) if time]
    times = times or [job.run_dir.episodes.stat().st_mtime]
    started_at, updated_at = _local_time(min(times)), _local_time(max(times))
    groups: defaultdict[str, list[Json]] = defaultdict(list)
    for trial in trials:
        info = trial["agent_info"]
        key = (info["name"], info["model_info"]["name"], trial["source"] or "adhoc")
        groups["__".join(filter(None, key))].append(trial)
    errors = [one["exception_info"]["exception_type"] for one in trials if one["exception_info"] is not None]
    used = [trial["agent_result"] for trial in trials]
    return {
        "id": stable_id(job.run_id),
        "started_at": started_at,
        "updated_at": updated_at,
        "finished_at": updated_at if len(summary.finished) >= summary.planned else None,
        "n_total_trials": summary.planned,
        "stats": {
            "n_completed_trials": len(trials),
            "n_errored_trials": len(errors),
            "n_running_trials": 0,
            "n_pending_trials": summary.planned - len(trials),
            "n_cancelled_trials": errors.count(CANCELLED),
            "n_retries": sum(one.outcome not in UNFINISHED for one in summary.results) - len(summary.finished),
            "evals": {key: _eval(group) for key, group in groups.items()},
            "n_cache_tokens": None,
            **{name: sum(one[name] for one in used) for name in ("n_input_tokens", "n_output_tokens", "cost_usd")},
        },
    }


def mean_rewards(rewards: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Returns the mean rewards of trials, as Harbor's metric `mean` computes them. A missing reward counts as 0.

    If the rewards have at most one key, the result has the key `mean`. Otherwise, it has the mean of each key.
    """
    keys = sorted({key for one in rewards for key in one or ()})
    means = {key: sum((one or {}).get(key, 0) for one in rewards) / len(rewards) for key in keys}
    return means if len(means) > 1 else {"mean": next(iter(means.values()), 0.0)}


def pass_rates(successes: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    """Returns the mean pass@k over tasks, for each `k` above 1 that is a power of two or a multiple of five.

    `successes` contains, for each task, whether each attempt passed. `k` is at most the smallest number of attempts.
    """
    most = min(map(len, successes.values()), default=0)
    numbers = sorted({*(2**exponent for exponent in range(1, most.bit_length())), *range(5, most + 1, 5)})
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
    return iso_8601(seconds) if seconds > 0 else None


def _local_time(seconds: float) -> str:
    """Formats epoch seconds as a local time without a zone, as in Harbor. Invalid values become the time 0."""
    try:
        return datetime.fromtimestamp(seconds).isoformat()
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0).isoformat()


def write_job(run: Path, out: Path, trajectories: Iterable[EpisodeTrajectory]) -> Json | None:
    """Writes the job of a run to the folder `out`, which appears only when it is complete.

    Returns the `stats` of its `result.json`; `None` if no attempt has a result, so that nothing is written.

    Raises:
        ConfigError: The run cannot be read.
        OSError: The folder cannot be written.
    """
    job = read_job(run)
    if not job.summary.results:
        return None
    with appearing(out) as place:
        return _Writer(job, place, out.parent.resolve() / out.name).write(trajectories)


def trial_name(task_name: str, episode_id: str) -> str:
    """Returns the name of a trial: `<task>__<7 characters>`, from the task's name and a hash of the episode's id."""
    head = re.sub(r"[^A-Za-z0-9._-]", "-", task_name.split("/")[-1])
    digest = hashlib.sha256(episode_id.encode(errors="backslashreplace")).hexdigest()
    return f"{head[:MAX_TASK_CHARS].lstrip('.').rstrip('_-') or 'task'}__{digest[:HASH_CHARS]}"


def stable_id(*parts: str) -> str:
    """Derives a UUID from the parts. The same parts always give the same UUID, so that exports can be repeated."""
    return str(uuid.uuid5(_NAMESPACE, "/".join(parts).encode(errors="backslashreplace").decode()))


class _Writer:
    def __init__(self, job: RecordedJob, place: Path, out: Path) -> None:
        """Prepares an export to the temporary folder `place`, which the caller renames to `out`."""
        self._job, self._place, self._out = job, place, out
        self._agent, self._environment = job.agent(), job.environment()
        self._names = {one.episode_id: trial_name(one.task_name, one.episode_id) for one in job.summary.final}
        self._rollouts: dict[str, list[dict[str, Any]] | None] = {}

    def write(self, trajectories: Iterable[EpisodeTrajectory]) -> Json:
        """Writes the job, and returns the `stats` of its `result.json`."""
        job = self._job
        for trajectory in trajectories:
            if (name := self._names.get(trajectory.episode_id)) is not None:
                document, _ = to_atif(trajectory)
                self._rollouts[trajectory.episode_id] = _rollout_details(document)
                _write_json(self._place / name / "agent" / "trajectory.json", document, indent=None)
        result = job_result(job, [self._write_trial(one) for one in job.summary.final])
        attempts, most = job.config.get("attempts"), max(1 + one.attempt for one in job.summary.final)
        config = {
            "job_name": self._out.name,
            "jobs_dir": str(self._out.parent),
            "n_attempts": max(attempts, most) if is_count(attempts) else most,
            "environment": self._environment,
            "agents": [self._agent],
            "tasks": [job.task(task) for task in job.tasks],
        }
        _write_json(self._place / "config.json", config)
        _write_json(self._place / "result.json", result)
        _copy_file(job.run_dir.log, self._place / "job.log")
        stats: Json = result["stats"]
        return stats

    def _write_trial(self, result: EpisodeResult) -> Json:
        """Writes the folder of a trial except its trajectory. Returns the content of its `result.json`."""
        job, name = self._job, self._names[result.episode_id]
        folder, steps = self._place / name, [Path(STEPS_FOLDER, stage.name) for stage in result.stages]
        for inside in (Path(), *steps):
            (folder / inside / "agent").mkdir(parents=True, exist_ok=True)
        for inside in steps or [Path()]:
            for kind in (VERIFIER_FOLDER, ARTIFACTS_FOLDER):
                (folder / inside / kind).mkdir()
                if SAFE_NAME.fullmatch(result.episode_id):
                    _copy_tree(job.run_dir.files / result.episode_id / inside / kind, folder / inside / kind)
        if (error := trial_error(result)) is not None:
            text = mask_known_secrets(f"{error.type}: {error.message}\n")
            (folder / "exception.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        config = {
            "task": job.task(result.task_name),
            "trial_name": name,
            "trials_dir": str(self._out),
            "environment": self._environment,
            "agent": self._agent,
            "job_id": stable_id(job.run_id),
        }
        trial = trial_result(job, result, config, self._rollouts.get(result.episode_id))
        _write_json(folder / "config.json", config)
        _write_json(folder / "result.json", trial)
        return trial


def _write_json(path: Path, data: Json, *, indent: int | None = 4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
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
