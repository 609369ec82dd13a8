"""The `lock.json` of the job and its trials: what exactly was played. Nulls are left out, as in Harbor's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ares_exp.export_job.harbor_config import MULTIPLIERS, without_nulls
from ares_exp.export_job.task_facts import TaskFacts
from ares_exp.export_job.trial_result import utc

TRIAL_SCHEMA = 2
JOB_SCHEMA = 3


def trial_lock(task: TaskFacts, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The lock of a trial; `None` where the digest of its task is not known, without which there is none.

    Args:
        task: What is played.
        config: Of the trial, in full.
    """
    if task.digest is None:
        return None
    lock = {
        "schema_version": TRIAL_SCHEMA,
        "task": {
            "name": task.path.rpartition("/")[2],
            "version": task.version,
            "type": "local" if task.git_url is None else "git",
            "digest": task.digest,
            "source": task.source,
            **task.place,
        },
        "install_only": False,
        **{key: config[key] for key in MULTIPLIERS},
        "agent": config["agent"],
        "bridge_inputs": {},
        "skills": [],
        "environment": config["environment"],
        "verifier": {**config["verifier"], "environment_mode": task.verifier_mode},
    }
    found: dict[str, Any] = without_nulls(lock)
    return found


def job_lock(
    trials: Sequence[Mapping[str, Any]], *, created_at: float, concurrency: int, retry: Mapping[str, Any]
) -> dict[str, Any]:
    """The lock of the job; of `harbor`, which has not played it, nothing is known.

    Args:
        trials: The locks of all trials that were asked for.
        created_at: Epoch seconds.
        concurrency: How many trials at once.
        retry: As in the job's config.
    """
    return {
        "schema_version": JOB_SCHEMA,
        "created_at": utc(created_at) or utc(1.0),
        "harbor": {},
        "n_concurrent_trials": concurrency,
        "retry": without_nulls(retry),
        "trials": list(trials),
    }
