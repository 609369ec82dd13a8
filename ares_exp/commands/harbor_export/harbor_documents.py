"""The documents of a job and its trials in the form of Harbor's models. Missing config keys have Harbor's defaults.

An error keeps the name of its class, which is also Harbor's name if Harbor has the same error. The time limit is
Harbor's `AgentTimeoutError`, which can occur together with a reward. Harbor has no error for limits on steps, tokens
and cost, so `agent_result.metadata` names the limit. An attempt without a result (cancelled, closed, lost, abandoned)
has a `CancelledError`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any

from ares_exp.commands.harbor_export.recorded_job import RecordedJob
from ares_exp.config.targets import find_part
from ares_exp.containers.container import ContainerFactoryBase
from ares_exp.records.results import UNFINISHED, EpisodeResult, ErrorInfo, Outcome, StageResult
from ares_exp.records.statistics.task_statistics import pass_at_k
from ares_exp.tasks.task_files import content_of

CANCELLED = "CancelledError"
NO_DATASET = "adhoc"
NO_TRACEBACK = "ares_exp records no tracebacks."
_PATH_OF_CLASS = re.compile(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

Json = Mapping[str, Any]


def job_config(job: RecordedJob, *, name: str, jobs_dir: str) -> dict[str, Any]:
    """Returns the config of the job, which lists every task."""
    return {
        "job_name": name,
        "jobs_dir": jobs_dir,
        "n_attempts": job.attempts_each,
        "environment": _environment(job),
        "agents": [_agent(job)],
        "tasks": [_task(job, task) for task in job.tasks],
    }


def _agent(job: RecordedJob) -> dict[str, str]:
    name = str(job.group("agent").get("_target_") or "").rpartition(".")[2].removesuffix("Factory")
    model = job.group("policy").get("model")
    # Without a model, the policy itself responds: `oracle`, `scripted`, `replay`.
    return {
        "name": name or "unknown",
        "model_name": model
        if isinstance(model, str) and model
        else job.class_name("policy").removesuffix("Policy").lower(),
    }


def _environment(job: RecordedJob) -> dict[str, str]:
    """Returns Harbor's name or our class of the container backend, or the environment if it has no container."""
    target = str(job.group("container").get("_target_") or "")
    scored = [one for one in job.results if one.reward is not None]
    if scored and not any(one.container_image for one in scored):
        target = str(job.group("env").get("_target_") or "")
    backend = find_part("container", target)
    if isinstance(backend, type) and issubclass(backend, ContainerFactoryBase) and backend.harbor_name:
        return {"type": backend.harbor_name}
    known = _PATH_OF_CLASS.fullmatch(target) is not None
    return {"import_path": ":".join(target.rsplit(".", 1))} if known else {"type": "docker"}


def trial_config(job: RecordedJob, of_job: Json, *, task: str, name: str, job_id: str) -> dict[str, Any]:
    """Returns the config of a trial of a task, derived from the config of its job."""
    return {
        "task": _task(job, task),
        "trial_name": name,
        "trials_dir": f"{of_job['jobs_dir']}/{of_job['job_name']}",
        "environment": of_job["environment"],
        "agent": of_job["agents"][0],
        "job_id": job_id,
    }


def _task(job: RecordedJob, task: str) -> dict[str, str]:
    place, source = job.place(task)
    return place if source is None else {**place, "source": source}


def trial_error(result: EpisodeResult) -> ErrorInfo | None:
    """Returns the error of a trial; `None` if the trial has no error."""
    error = result.error
    if result.outcome in UNFINISHED:
        return ErrorInfo(CANCELLED, f"{result.outcome.value}: {error.message if error is not None else 'no result'}")
    if result.outcome is Outcome.TRUNCATED:
        return None if result.stages else _timeout_error(result.limit)
    return error


def _timeout_error(limit: str | None) -> ErrorInfo | None:
    return ErrorInfo("AgentTimeoutError", "The agent reached its time limit.") if limit == "time" else None


def trial_result(
    job: RecordedJob, result: EpisodeResult, trajectory: Json | None, *, config: Json, trial_id: str, uri: str
) -> dict[str, Any]:
    """Returns the `result.json` of a trial: every key that Harbor writes, nulls included.

    Args:
        job: Records of the run.
        result: Result of the trial.
        trajectory: Trajectory of the trial in ATIF; `None` if it is missing.
        config: Config of the trial.
        trial_id: UUID of the trial.
        uri: URI of the trial's folder.
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
    """Returns the result of a stage. The usage of all stages is in the result of the trial."""
    return {
        "step_name": stage.name,
        "agent_result": None,
        "verifier_result": _rewards(stage),
        "exception_info": _exception(_timeout_error(stage.truncated_by), result.finished_at),
        "agent_execution": None,
        "verifier": None,
    }


def _context(result: EpisodeResult, trajectory: Json | None) -> dict[str, Any]:
    """Returns usage and token ids of an agent. `metadata` contains the values for which Harbor has no key."""
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
    """Returns the token ids and log-probabilities of all LLM calls; `None` if a call lacks completion ids.

    A field that some calls lack is omitted.
    """
    turns = [step["metrics"] for step in document["steps"] if "metrics" in step]
    names = ("prompt_token_ids", "completion_token_ids", "logprobs")
    details = {name: [turn[name] for turn in turns] for name in names if all(turn.get(name) for turn in turns)}
    return [details] if turns and "completion_token_ids" in details else None


def _rewards(result: EpisodeResult | StageResult) -> dict[str, Any] | None:
    return None if result.reward is None else {"rewards": dict(result.rewards) or {"reward": result.reward}}


def job_result(job: RecordedJob, trials: Sequence[Json], *, job_id: str) -> dict[str, Any]:
    """Returns the `result.json` of the job. Its `finished_at` is null while any attempt has no result.

    Args:
        job: Records of the run.
        trials: Content of `result.json` of every trial.
        job_id: UUID of the job.
    """
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
    """Returns Harbor's metric `mean`, in which a missing reward counts as 0.

    If all rewards together have at most one key, the metric is named `mean`. Otherwise each key has its own metric.
    """
    keys = sorted({key for one in rewards for key in one or ()})
    if len(keys) <= 1:
        return {"mean": sum(next(iter((one or {}).values()), 0) for one in rewards) / len(rewards)}
    return {key: sum((one or {}).get(key, 0) for one in rewards) / len(rewards) for key in keys}


def pass_rates(successes: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    """Returns the mean pass@k over tasks, for powers of two and multiples of five up to the smallest attempt number.

    Args:
        successes: Whether each attempt passed, by task.
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
        # Only if every reward has one key and is 0 or 1. A missing reward counts as a failure.
        "pass_at_k": pass_rates(successes) if binary else {},
        "reward_stats": by_reward,
        "exception_stats": by_exception,
    }


def _utc(seconds: float) -> str | None:
    """Returns a time in UTC; `None` if it is unknown."""
    text = _at(seconds, UTC) if seconds > 0 else None
    return text.replace("+00:00", "Z") if text is not None else None


def _at(seconds: float, zone: tzinfo | None) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, zone).isoformat()
    except (ValueError, OverflowError, OSError):
        return None
