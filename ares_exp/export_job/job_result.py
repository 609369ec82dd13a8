"""The `result.json` of the job: what its trials add up to, in Harbor's way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ares_exp.export_job.exported_errors import CANCELLED
from ares_exp.export_job.recorded_job import RecordedJob

NO_DATASET = "adhoc"

Trial = Mapping[str, Any]


def job_result(job: RecordedJob, trials: Sequence[Trial], *, job_id: str) -> dict[str, Any]:
    """The document, of which `finished_at` is null while anything is owed.

    Args:
        job: The run.
        trials: What `trial_result` gave for every trial that has a result.
        job_id: A UUID.
    """
    num_running = sum(one.result is None for one in job.attempts)
    updated_at = _local(job.updated_at)
    return {
        "id": job_id,
        "started_at": _local(job.started_at),
        "updated_at": updated_at,
        "finished_at": updated_at if job.is_finished else None,
        "n_total_trials": job.planned,
        "stats": {
            "n_completed_trials": len(trials),
            "n_errored_trials": sum(one["exception_info"] is not None for one in trials),
            "n_running_trials": num_running,
            "n_pending_trials": max(job.planned - len(trials) - num_running, 0),
            "n_cancelled_trials": sum(_exception(one) == CANCELLED for one in trials),
            "n_retries": job.num_retries,
            "evals": _evals(trials),
            **_totals(trials),
        },
    }


def evals_key(trial: Trial) -> str:
    """`agent__model__dataset`."""
    info = trial["agent_info"]
    model = info["model_info"]["name"] if info["model_info"] else None
    return "__".join(filter(None, (info["name"], model, trial["source"] or NO_DATASET)))


def mean_rewards(rewards: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Harbor's metric `mean`, where a missing reward counts as 0.

    As long as there is one key at most, the number is called `mean`, else there is one for each key.
    """
    keys = sorted({key for one in rewards for key in one or ()})
    if len(keys) <= 1:
        return {"mean": sum(next(iter((one or {}).values()), 0) for one in rewards) / len(rewards)}
    return {key: sum((one or {}).get(key, 0) for one in rewards) / len(rewards) for key in keys}


def pass_at_k(successes: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    """pass@k for powers of two and multiples of five, up to the smallest number of attempts; mean over the tasks.

    Args:
        successes: Whether each attempt passed, by task.
    """
    most = min(map(len, successes.values()), default=0)
    powers = {2**exponent for exponent in range(1, most.bit_length())}
    numbers = sorted(k for k in {*powers, *range(5, most + 1, 5)} if k <= most)
    return {str(k): sum(_pass_at_k(each, k) for each in successes.values()) / len(successes) for k in numbers}


def _pass_at_k(passed: Sequence[bool], k: int) -> float:
    failures, all_fail = len(passed) - sum(passed), 1.0
    for drawn in range(k):
        all_fail *= max(failures - drawn, 0) / (len(passed) - drawn)
    return 1.0 - all_fail


def _evals(trials: Sequence[Trial]) -> dict[str, Any]:
    groups: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[evals_key(trial)].append(trial)
    return {key: _eval(group) for key, group in groups.items()}


def _eval(trials: Sequence[Trial]) -> dict[str, Any]:
    rewards = [_rewards(one) for one in trials]
    by_reward: defaultdict[str, defaultdict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    by_exception: defaultdict[str, list[str]] = defaultdict(list)
    for trial, given in zip(trials, rewards, strict=True):
        for key, value in (given or {}).items():
            by_reward[key][value].append(trial["trial_name"])
        if (exception := _exception(trial)) is not None:
            by_exception[exception].append(trial["trial_name"])
    return {
        "n_trials": sum(one is not None for one in rewards),
        "n_errors": sum(map(len, by_exception.values())),
        "metrics": [mean_rewards(rewards)],
        "pass_at_k": _pass_at_k_of(trials),
        "reward_stats": by_reward,
        "exception_stats": by_exception,
    }


def _pass_at_k_of(trials: Sequence[Trial]) -> dict[str, float]:
    """Empty unless every reward is one key's, and 0 or 1; a missing one is a failure."""
    successes: defaultdict[str, list[bool]] = defaultdict(list)
    for trial in trials:
        given = _rewards(trial)
        values = [0] if given is None else list(given.values())
        if len(values) != 1 or values[0] not in (0, 1):
            return {}
        successes[trial["task_name"]].append(values[0] == 1)
    return pass_at_k(successes)


def _totals(trials: Sequence[Trial]) -> dict[str, Any]:
    """Tokens and cost of all; `None` where no trial says."""
    names = ("n_input_tokens", "n_cache_tokens", "n_output_tokens", "cost_usd")
    contexts = [context for trial in trials for context in _contexts(trial)]
    known = {name: [one[name] for one in contexts if one[name] is not None] for name in names}
    return {name: sum(values) if values else None for name, values in known.items()}


def _contexts(trial: Trial) -> list[Mapping[str, Any]]:
    if trial["agent_result"] is not None:
        return [trial["agent_result"]]
    return [step["agent_result"] for step in trial["step_results"] or ()]


def _rewards(trial: Trial) -> Mapping[str, float] | None:
    return trial["verifier_result"]["rewards"] if trial["verifier_result"] is not None else None


def _exception(trial: Trial) -> str | None:
    return trial["exception_info"]["exception_type"] if trial["exception_info"] is not None else None


def _local(seconds: float) -> str:
    """Local time without a zone, as Harbor has it for jobs."""
    try:
        return datetime.fromtimestamp(seconds).isoformat()
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0).isoformat()
