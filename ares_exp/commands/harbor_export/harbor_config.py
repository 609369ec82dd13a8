"""The configs of a job and its trials, as Harbor's models read them. What they leave out is at Harbor's default."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ares_exp.commands.harbor_export.exported_tasks import ExportedTask
from ares_exp.commands.harbor_export.recorded_job import RecordedJob
from ares_exp.config.targets import find_part
from ares_exp.containers.container import ContainerFactoryBase

_PATH_OF_CLASS = re.compile(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*")
_LIMITS = ("limits", "timeouts", "verify_on_truncation")


def job_config(job: RecordedJob, tasks: Sequence[ExportedTask], *, name: str, jobs_dir: str) -> dict[str, Any]:
    """Returns the config of the job. The tasks are listed one by one."""
    concurrency = job.config.get("concurrency")
    return {
        "job_name": name,
        "jobs_dir": jobs_dir,
        "n_attempts": job.attempts_each,
        "n_concurrent_trials": concurrency if type(concurrency) is int and 0 < concurrency < 2**31 else 1,
        "environment": _environment(job),
        "agents": [_agent(job)],
        "tasks": [_task(task) for task in tasks],
    }


def trial_config(of_job: Mapping[str, Any], task: ExportedTask, *, name: str, job_id: str) -> dict[str, Any]:
    """Returns the config of a trial.

    Args:
        of_job: The config of its job.
        task: Its task.
        name: Its name.
        job_id: The id of its job.
    """
    return {
        "task": _task(task),
        "trial_name": name,
        "trials_dir": f"{of_job['jobs_dir']}/{of_job['job_name']}",
        "environment": of_job["environment"],
        "agent": of_job["agents"][0],
        "job_id": job_id,
    }


def _agent(job: RecordedJob) -> dict[str, Any]:
    """The agent. Its options, the policy and the limits are its `kwargs`."""
    target = str(job.group("agent").get("_target_") or "unknown")
    model = job.group("policy").get("model")
    limits = {key: job.config.get(key) for key in _LIMITS}
    policy = {"name": job.option("policy"), **_options(job, "policy")}
    return {
        "name": target.rpartition(".")[2].removesuffix("Factory") or "unknown",
        # Where no model answered, what did: `oracle`, `scripted`, `replay`.
        "model_name": model if isinstance(model, str) and model else job.option("policy"),
        "kwargs": _without_nulls({**_options(job, "agent"), **limits, "policy": policy}),
    }


def _environment(job: RecordedJob) -> dict[str, Any]:
    """The container backend, by Harbor's name where it has one, else by our class; or the environment without one."""
    target = str(job.group("container").get("_target_") or "")
    played = [one for one in job.results if one.reward is not None]
    if played and not any(one.container_image for one in played):
        target = str(job.group("env").get("_target_") or "")
    elif (name := _harbor_name(target)) is not None:
        return {"type": name}
    known = _PATH_OF_CLASS.fullmatch(target) is not None
    return {"import_path": ":".join(target.rsplit(".", 1))} if known else {"type": "docker"}


def _harbor_name(target: str) -> str | None:
    """Returns Harbor's name of a container backend that is an option here; `None` where it has none."""
    backend = find_part("container", target)
    is_ours = isinstance(backend, type) and issubclass(backend, ContainerFactoryBase)
    return backend.harbor_name if is_ours else None


def _task(task: ExportedTask) -> dict[str, Any]:
    return {**task.place, **({} if task.source is None else {"source": task.source})}


def _options(job: RecordedJob, group: str) -> dict[str, Any]:
    """The arguments of a component, without Hydra's own keys."""
    return {key: value for key, value in job.group(group).items() if not key.startswith("_")}


def _without_nulls(config: Any) -> Any:
    if isinstance(config, Mapping):
        return {key: _without_nulls(value) for key, value in config.items() if value is not None}
    return [_without_nulls(one) for one in config] if isinstance(config, list) else config
