"""The `result.json` of a trial: every key that Harbor writes, nulls included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ares_exp.export_job.exported_errors import timeout_error, trial_error, truncated_by
from ares_exp.export_job.task_facts import TaskFacts
from ares_exp.results import EpisodeResult, ErrorInfo, StageResult

NO_TRACEBACK = "ares_exp records no tracebacks."
_PHASES = {"start": ("start",), "agent": ("agent", "policy", "snapshot"), "verify": ("verify",)}
"""Ours that Harbor has too, and what they consist of: there, the agent's takes in what it waits for its model."""


@dataclass(frozen=True, slots=True)
class TrialIdentity:
    """What a trial is, whatever came of it.

    Attributes:
        name: Of its folder.
        uri: Of its folder.
        trial_id: A UUID.
        task: What is played.
        config: In full, as `harbor_config.trial_config` gives it.
        agent_version: Of the code that played it.
    """

    name: str
    uri: str
    trial_id: str
    task: TaskFacts
    config: Mapping[str, Any]
    agent_version: str


def trial_result(
    trial: TrialIdentity, result: EpisodeResult, documents: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """The document.

    Args:
        trial: Which trial it is.
        result: What came of it.
        documents: Its ATIF documents: one, or one for each stage, and maybe one of what came after; `None` where there
            is none.
    """
    error = trial_error(result)
    has_stages = bool(result.stages)
    told_by_stage = len(result.stages) == len(documents) and None not in documents
    timing = _phases(result)
    return {
        "id": trial.trial_id,
        "task_name": trial.task.name,
        "trial_name": trial.name,
        "trial_uri": trial.uri,
        "task_id": trial.task.place,
        "source": trial.task.source,
        "task_checksum": (trial.task.digest or "").removeprefix("sha256:"),
        "config": trial.config,
        "agent_info": {
            "name": trial.config["agent"]["name"],
            "version": trial.agent_version,
            "model_info": model_info(trial.config["agent"]["model_name"]),
        },
        "agent_result": None if told_by_stage else _agent_result(result, None if has_stages else documents[0]),
        "verifier_result": _rewards(result.reward, result.rewards),
        "verifier_environment_mode": trial.task.verifier_mode,
        "exception_info": exception_info(error, result.finished_at) if error is not None else None,
        "started_at": utc(result.started_at),
        "finished_at": utc(result.finished_at),
        "environment_setup": timing.get("start"),
        "agent_setup": None,
        "agent_execution": None if has_stages else timing.get("agent"),
        "verifier": None if has_stages else timing.get("verify"),
        "step_results": [
            _step_result(stage, document, result) for stage, document in zip(result.stages, documents, strict=False)
        ]
        if has_stages
        else None,
    }


def model_info(model_name: str) -> dict[str, Any]:
    """A model's name as Harbor takes it apart: what is before the first slash is the provider."""
    provider, slash, name = model_name.partition("/")
    return {"name": name, "provider": provider} if slash else {"name": model_name, "provider": None}


def exception_info(error: ErrorInfo, occurred_at: float) -> dict[str, Any]:
    """An error as Harbor records it."""
    return {
        "exception_type": error.type,
        "exception_message": error.message,
        "exception_traceback": NO_TRACEBACK,
        "occurred_at": utc(occurred_at) or utc(1.0),
    }


def utc(seconds: float) -> str | None:
    """A point in time; `None` where it is not known, or is none."""
    try:
        text = datetime.fromtimestamp(seconds, UTC).isoformat() if seconds > 0 else None
    except (ValueError, OverflowError, OSError):
        return None
    return text.replace("+00:00", "Z") if text is not None else None


def _phases(result: EpisodeResult) -> dict[str, dict[str, Any]]:
    """When the phases were, of which the lengths are known: they followed each other from the start on."""
    clock, found = result.started_at, {}
    for name, parts in _PHASES.items():
        if name in result.phase_sec:
            length = sum(result.phase_sec.get(part, 0.0) for part in parts)
            end = max(clock, min(clock + length, result.finished_at))
            found[name] = {"started_at": utc(clock), "finished_at": utc(end)}
            clock = end
    return found


def _agent_result(result: EpisodeResult, document: Mapping[str, Any] | None) -> dict[str, Any]:
    metadata = _metadata(result, truncated_by=truncated_by(result), num_steps=result.num_steps)
    return _context(result.prompt_tokens, result.generated_tokens, result.cost, document, metadata)


def _step_result(stage: StageResult, document: Mapping[str, Any] | None, result: EpisodeResult) -> dict[str, Any]:
    metrics = document["final_metrics"] if document is not None else {}
    tokens = (metrics.get("total_prompt_tokens"), metrics.get("total_completion_tokens"), metrics.get("total_cost_usd"))
    metadata = _metadata(result, truncated_by=stage.truncated_by, num_steps=stage.num_steps)
    error = timeout_error(stage.truncated_by)
    return {
        "step_name": stage.name,
        "agent_result": _context(*tokens, document, metadata),
        "verifier_result": _rewards(stage.reward, stage.rewards),
        "exception_info": exception_info(error, result.finished_at) if error is not None else None,
        "agent_execution": None,
        "verifier": None,
    }


def _metadata(result: EpisodeResult, **more: Any) -> dict[str, Any]:
    """What Harbor has no place for."""
    names = ("episode_id", "attempt", "retry", "seed", "container_image")
    return {**{name: getattr(result, name) for name in names}, "outcome": result.outcome.value, **more}


def _context(
    prompt: int | None,
    generated: int | None,
    cost: float | None,
    document: Mapping[str, Any] | None,
    metadata: dict[str, Any],
) -> dict[str, Any]:
    return {
        "n_input_tokens": prompt,
        "n_cache_tokens": None,
        "n_output_tokens": generated,
        "cost_usd": cost,
        "model_usage": None,
        "rollout_details": _rollout_details(document) if document is not None else None,
        "metadata": {"ares_exp": metadata},
    }


def _rollout_details(document: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Token ids and log-probabilities of every turn, where every turn has them."""
    turns = [step["metrics"] for step in document["steps"] if "metrics" in step]
    names = ("prompt_token_ids", "completion_token_ids", "logprobs")
    details = {name: [turn[name] for turn in turns] for name in names if all(turn.get(name) for turn in turns)}
    return [details] if turns and "completion_token_ids" in details else None


def _rewards(reward: float | None, rewards: Mapping[str, float]) -> dict[str, Any] | None:
    if reward is None:
        return None
    return {"rewards": dict(rewards) or {"reward": reward}}
