"""The configs of a job and its trials as Harbor writes them: in full, or without what is at its default."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ares_exp.errors import ConfigError
from ares_exp.export_job.recorded_job import RecordedJob
from ares_exp.export_job.task_facts import TaskFacts

AGENT: dict[str, Any] = {
    "name": None,
    "import_path": None,
    "model_name": None,
    "base_url": None,
    "model_api_key_name": None,
    "model_api_format": None,
    "skip_model_parsing": False,
    "n_concurrent": None,
    "concurrency_group": None,
    "skills": [],
    "override_timeout_sec": None,
    "override_setup_timeout_sec": None,
    "max_timeout_sec": None,
    "resume_trajectory": False,
    "load_trajectory": None,
    "extra_allowed_hosts": [],
    "kwargs": {},
    "mcp_servers": [],
}
ENVIRONMENT: dict[str, Any] = {
    "type": None,
    "import_path": None,
    "force_build": False,
    "delete": True,
    "stream": False,
    "cpu_enforcement_policy": "auto",
    "memory_enforcement_policy": "auto",
    "override_cpus": None,
    "override_memory_mb": None,
    "override_storage_mb": None,
    "override_gpus": None,
    "override_tpu": None,
    "mounts": None,
    "extra_docker_compose": [],
    "kwargs": {},
    "extra_allowed_hosts": [],
}
VERIFIER: dict[str, Any] = {"override_timeout_sec": None, "max_timeout_sec": None, "disable": False}
TASK: dict[str, Any] = {
    "path": None,
    "git_url": None,
    "git_commit_id": None,
    "name": None,
    "ref": None,
    "overwrite": False,
    "download_dir": None,
    "source": None,
}
RETRY: dict[str, Any] = {
    "max_retries": 0,
    "include_exceptions": None,
    "exclude_exceptions": [
        "AgentAuthenticationError",
        "AgentSafetyRefusalError",
        "AgentTimeoutError",
        "ApiUsageLimitError",
        "ModelNotFoundError",
        "RewardFileEmptyError",
        "RewardFileNotFoundError",
        "UnsupportedModelParametersError",
        "VerifierOutputParseError",
        "VerifierTimeoutError",
    ],
    "wait_multiplier": 1.0,
    "min_wait_sec": 1.0,
    "max_wait_sec": 60.0,
}
MULTIPLIERS: dict[str, Any] = {
    "timeout_multiplier": 1.0,
    "agent_timeout_multiplier": None,
    "verifier_timeout_multiplier": None,
    "agent_setup_timeout_multiplier": None,
    "environment_build_timeout_multiplier": None,
}
BY_DEFAULT: dict[str, Any] = {  # where the table above is no default
    "agent": {**AGENT, "name": "oracle"},
    "environment": {**ENVIRONMENT, "type": "docker"},
}
TRIAL: dict[str, Any] = {
    "task": None,
    "trial_name": "",
    "trials_dir": "trials",
    "install_only": False,
    **MULTIPLIERS,
    **BY_DEFAULT,
    "user_agent": None,
    "verifier": VERIFIER,
    "artifacts": [],
    "extra_instruction_paths": [],
    "extra_instructions": [],
    "job_id": None,
    "source_trial": None,
}
JOB: dict[str, Any] = {
    "job_name": None,
    "jobs_dir": "jobs",
    "n_attempts": 1,
    **MULTIPLIERS,
    "n_concurrent_trials": 4,
    "retry": RETRY,
    "environment": BY_DEFAULT["environment"],
    "verifier": VERIFIER,
    "agents": [BY_DEFAULT["agent"]],
    "datasets": [],
    "tasks": [],
}
_TABLES = {"task": TASK, "agent": AGENT, "environment": ENVIRONMENT, "verifier": VERIFIER, "retry": RETRY}
_LISTS = {"agents": AGENT, "tasks": TASK}
_PATH_OF_CLASS = re.compile(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*")
_LIMITS = ("step_limit", "token_limit", "cost_limit", "verify_on_truncation")


def without_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A config as Harbor saves it.

    Args:
        config: In full.
        defaults: Its table above.
    """
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in defaults and value == defaults[key]:
            continue
        if key in _TABLES:
            value = without_defaults(value, _TABLES[key])
        elif key in _LISTS:
            value = [without_defaults(one, _LISTS[key]) for one in value]
        kept[key] = value
    return kept


def without_nulls(config: Any) -> Any:
    """A config as Harbor writes it into a lock."""
    if isinstance(config, Mapping):
        return {key: without_nulls(value) for key, value in config.items() if value is not None}
    return [without_nulls(one) for one in config] if isinstance(config, list) else config


def agent_config(job: RecordedJob) -> dict[str, Any]:
    """The agent: what it was made with, the policy and the limits are its `kwargs`."""
    policy = job.group("policy")
    limits = {key: job.config.get(key) for key in _LIMITS}
    return {
        **AGENT,
        "name": agent_name(job),
        "model_name": model_name(job),
        "base_url": _text(policy.get("base_url")),
        "model_api_key_name": _text(policy.get("api_key_env")),
        "override_timeout_sec": _seconds(job, "agent_timeout_sec"),
        "max_timeout_sec": _seconds(job, "agent_timeout_max_sec"),
        "kwargs": without_nulls(
            {**_options(job, "agent"), **limits, "policy": {"name": job.option("policy"), **_options(job, "policy")}}
        ),
    }


def agent_name(job: RecordedJob) -> str:
    """The class of the agent, as trajectories name it."""
    target = str(job.group("agent").get("_target_") or "unknown")
    return target.rpartition(".")[2].removesuffix("Factory") or "unknown"


def model_name(job: RecordedJob) -> str:
    """The model; where none answered, what did: `oracle`, `scripted`, `replay`."""
    return _text(job.group("policy").get("model")) or job.option("policy")


def environment_config(job: RecordedJob) -> dict[str, Any]:
    """The container backend, by Harbor's name where it has one, else by our class; or the environment without one."""
    target = str(job.group("container").get("_target_") or "")
    played = [one.result for one in job.attempts if one.result is not None and one.result.reward is not None]
    if played and not any(one.container_image for one in played):
        target = str(job.group("env").get("_target_") or "")
    elif (backend := target.rpartition(".")[2].removesuffix("ContainerFactory").lower()) in ("docker", "daytona"):
        return {**ENVIRONMENT, "type": backend}
    if not _PATH_OF_CLASS.fullmatch(target):
        return {**ENVIRONMENT, "type": "docker"}
    return {**ENVIRONMENT, "import_path": ":".join(target.rsplit(".", 1))}


def verifier_config(job: RecordedJob) -> dict[str, Any]:
    """The verifier's limits."""
    return {
        **VERIFIER,
        "override_timeout_sec": _seconds(job, "verifier_timeout_sec"),
        "max_timeout_sec": _seconds(job, "verifier_timeout_max_sec"),
    }


def multipliers(job: RecordedJob) -> dict[str, Any]:
    """What the time limits are multiplied with."""
    return {**MULTIPLIERS, **{key: value for key in MULTIPLIERS if (value := _seconds(job, key)) is not None}}


def task_config(task: TaskFacts) -> dict[str, Any]:
    """Where a task is found."""
    return {**TASK, **task.place, "source": task.source}


def job_config(job: RecordedJob, tasks: Sequence[TaskFacts], *, name: str, jobs_dir: str) -> dict[str, Any]:
    """The config of the job, in full but for what is always at its default. The tasks are listed one by one."""
    return {
        **JOB,
        **multipliers(job),
        "job_name": name,
        "jobs_dir": jobs_dir,
        "n_attempts": job.attempts_each,
        "n_concurrent_trials": _whole(job.config.get("concurrency")) or JOB["n_concurrent_trials"],
        "retry": retry_config(job),
        "environment": environment_config(job),
        "verifier": verifier_config(job),
        "agents": [agent_config(job)],
        "tasks": [task_config(task) for task in tasks],
    }


def trial_config(of_job: Mapping[str, Any], task: TaskFacts, *, name: str, job_id: str) -> dict[str, Any]:
    """The config of a trial, in full.

    Args:
        of_job: What `job_config` gave.
        task: What is played.
        name: Of the trial.
        job_id: Of the job.
    """
    return {
        **TRIAL,
        **{key: of_job[key] for key in (*MULTIPLIERS, "environment", "verifier")},
        "task": task_config(task),
        "trial_name": name,
        "trials_dir": f"{of_job['jobs_dir']}/{of_job['job_name']}",
        "agent": of_job["agents"][0],
        "job_id": job_id,
    }


def retry_config(job: RecordedJob) -> dict[str, Any]:
    """The nearest to our rules, which are for each kind of error: the most tries that one of them gives, and its waits.

    What is tried again is named if the rules do so; our outcomes have no names there.
    """
    rules = job.group("retry")
    errors = rules.get("errors")
    by_class = {str(name): _whole(tries) for name, tries in errors.items()} if isinstance(errors, Mapping) else {}
    by_outcome = [_whole(value) for key, value in rules.items() if key.endswith("error") or key == "errored"]
    most = max([*by_outcome, *by_class.values(), 0])
    if not most:
        return RETRY
    named = sorted(name for name, tries in by_class.items() if tries)
    return {
        **RETRY,
        "max_retries": most,
        "include_exceptions": named if named and not any(by_outcome) else None,
        "exclude_exceptions": [],
        "wait_multiplier": 2.0,
        "min_wait_sec": _number(rules.get("base_sec")) or RETRY["min_wait_sec"],
        "max_wait_sec": _number(rules.get("max_wait_sec")) or RETRY["max_wait_sec"],
    }


def _options(job: RecordedJob, group: str) -> dict[str, Any]:
    """What a component was made with; not what Hydra makes it from."""
    return {key: value for key, value in job.group(group).items() if not key.startswith("_")}


def _seconds(job: RecordedJob, key: str) -> float | None:
    value = job.config.get(key)
    if value is not None and _number(value) is None:
        raise ConfigError(f"{job.run_dir.config}: expected `{key}` to be a number, got {value!r:.80}.")
    return _number(value)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e100 else None


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 < value < 2**31 else 0


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
