"""The `result.json` of the job: totals of its trials, in Harbor's way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ares_exp.commands.harbor_export.exported_errors import CANCELLED
from ares_exp.commands.harbor_export.recorded_job import RecordedJob
from ares_exp.records.statistics.task_statistics import pass_at_k

NO_DATASET = "adhoc"

Trial = Mapping[str, Any]


def job_result(job: RecordedJob, trials: Sequence[Trial], *, job_id: str) -> dict[str, Any]:
    """Returns the document. Its `finished_at` is null while an attempt has no result.

    Args:
        job: The run.
        trials: The `result.json` of every trial.
        job_id: A UUID.
    """
    started_at, updated_at = map(_local, job.times)
    groups: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        info = trial["agent_info"]
        key = (info["name"], info["model_info"]["name"], trial["source"] or NO_DATASET)
        groups["__".join(filter(None, key))].append(trial)
    return {
        "id": job_id,
        "started_at": started_at,
        "updated_at": updated_at,
        "finished_at": updated_at if job.is_finished else None,
        "n_total_trials": job.planned,
        "stats": {
            "n_completed_trials": len(trials),
            "n_errored_trials": sum(one["exception_info"] is not None for one in trials),
            "n_running_trials": 0,
            "n_pending_trials": job.planned - len(trials),
            "n_cancelled_trials": sum(_exception(one) == CANCELLED for one in trials),
            "n_retries": job.num_retries,
            "evals": {key: _eval(group) for key, group in groups.items()},
            **_totals(trials),
        },
    }


def mean_rewards(rewards: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Returns Harbor's metric `mean`, in which a missing reward counts as 0.

    Where all rewards have at most one key, the number is called `mean`; else there is one for each key.
    """
    keys = sorted({key for one in rewards for key in one or ()})
    if len(keys) <= 1:
        return {"mean": sum(next(iter((one or {}).values()), 0) for one in rewards) / len(rewards)}
    return {key: sum((one or {}).get(key, 0) for one in rewards) / len(rewards) for key in keys}


def pass_rates(successes: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    """Returns pass@k for powers of two and multiples of five, up to the smallest number of attempts; mean over tasks.

    Args:
        successes: Whether each attempt passed, by task.
    """
    most = min(map(len, successes.values()), default=0)
    powers = {2**exponent for exponent in range(1, most.bit_length())}
    numbers = sorted(k for k in {*powers, *range(5, most + 1, 5)} if k <= most)
    return {
        str(k): sum(pass_at_k(len(each), sum(each), k) for each in successes.values()) / len(successes) for k in numbers
    }


def _eval(trials: Sequence[Trial]) -> dict[str, Any]:
    rewards = [_rewards(one) for one in trials]
    by_reward: defaultdict[str, defaultdict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    by_exception: defaultdict[str, list[str]] = defaultdict(list)
    successes: defaultdict[str, list[bool]] = defaultdict(list)
    binary = True
    for trial, given in zip(trials, rewards, strict=True):
        for key, value in (given or {}).items():
            by_reward[key][value].append(trial["trial_name"])
        if (exception := _exception(trial)) is not None:
            by_exception[exception].append(trial["trial_name"])
        values = [0] if given is None else list(given.values())
        binary &= len(values) == 1 and values[0] in (0, 1)
        successes[trial["task_name"]].append(values[:1] == [1])
    return {
        "n_trials": sum(one is not None for one in rewards),
        "n_errors": sum(map(len, by_exception.values())),
        "metrics": [mean_rewards(rewards)],
        # Only where every reward is one key's, and 0 or 1; a missing one is a failure.
        "pass_at_k": pass_rates(successes) if binary else {},
        "reward_stats": by_reward,
        "exception_stats": by_exception,
    }


def _totals(trials: Sequence[Trial]) -> dict[str, Any]:
    """Tokens and cost of all; `None` where no trial says."""
    parts = [part for trial in trials for part in ([trial] if trial["agent_result"] else trial["step_results"] or ())]
    names = ("n_input_tokens", "n_cache_tokens", "n_output_tokens", "cost_usd")
    told = {name: [part["agent_result"][name] for part in parts] for name in names}
    known = {name: [value for value in values if value is not None] for name, values in told.items()}
    return {name: sum(values) if values else None for name, values in known.items()}


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
