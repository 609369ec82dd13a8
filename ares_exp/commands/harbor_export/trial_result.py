"""The `result.json` of a trial: every key that Harbor writes, nulls included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ares_exp.commands.harbor_export.exported_errors import timeout_error, trial_error, truncated_by
from ares_exp.commands.harbor_export.exported_tasks import ExportedTask
from ares_exp.records.results import EpisodeResult, ErrorInfo, StageResult

NO_TRACEBACK = "ares_exp records no tracebacks."
_PHASES = {"start": ("start",), "agent": ("agent", "policy", "snapshot"), "verify": ("verify",)}
"""Our phases that Harbor has too, and their parts: Harbor counts waiting for the model as the agent's."""

Documents = Sequence[Mapping[str, Any] | None]
"""The ATIF documents of a trial: one, or one for each stage, and maybe one of what came after; `None`: it has none."""


def trial_result(
    result: EpisodeResult,
    documents: Documents,
    *,
    task: ExportedTask,
    config: Mapping[str, Any],
    trial_id: str,
    uri: str,
    version: str,
) -> dict[str, Any]:
    """Returns the document.

    Args:
        result: The result of the trial.
        documents: Its trajectories.
        task: Its task.
        config: Its config.
        trial_id: A UUID.
        uri: Of its folder.
        version: Of the code that played it.
    """
    error, has_stages = trial_error(result), bool(result.stages)
    covered_by_stages = len(result.stages) == len(documents) and None not in documents
    timing = _phases(result)
    provider, slash, model = config["agent"]["model_name"].partition("/")
    return {
        "id": trial_id,
        "task_name": task.name,
        "trial_name": config["trial_name"],
        "trial_uri": uri,
        "task_id": task.place,
        "source": task.source,
        "task_checksum": task.checksum,
        "config": config,
        "agent_info": {
            "name": config["agent"]["name"],
            "version": version,
            "model_info": {"name": model if slash else provider, "provider": provider if slash else None},
        },
        "agent_result": None if covered_by_stages else _agent_result(result, None if has_stages else documents[0]),
        "verifier_result": _rewards(result.reward, result.rewards),
        "verifier_environment_mode": None,
        "exception_info": _exception(error, result.finished_at),
        "started_at": utc(result.started_at),
        "finished_at": utc(result.finished_at),
        "environment_setup": timing.get("start"),
        "agent_setup": None,
        "agent_execution": None if has_stages else timing.get("agent"),
        "verifier": None if has_stages else timing.get("verify"),
        "step_results": [_step(stage, part, result) for stage, part in zip(result.stages, documents, strict=False)]
        or None,
    }


def utc(seconds: float) -> str | None:
    """Returns a point in time; `None` where it is not known, or is none."""
    try:
        text = datetime.fromtimestamp(seconds, UTC).isoformat() if seconds > 0 else None
    except (ValueError, OverflowError, OSError):
        return None
    return text.replace("+00:00", "Z") if text is not None else None


def _exception(error: ErrorInfo | None, occurred_at: float) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "exception_type": error.type,
        "exception_message": error.message,
        "exception_traceback": NO_TRACEBACK,
        "occurred_at": utc(occurred_at) or utc(1.0),
    }


def _phases(result: EpisodeResult) -> dict[str, dict[str, Any]]:
    """Start and end of the phases, reckoned from their lengths: they follow each other from the start on."""
    clock, found = result.started_at, {}
    for name, parts in _PHASES.items():
        if name in result.phase_sec:
            length = sum(result.phase_sec.get(part, 0.0) for part in parts)
            end = max(clock, min(clock + length, result.finished_at))
            found[name] = {"started_at": utc(clock), "finished_at": utc(end)}
            clock = end
    return found


def _agent_result(result: EpisodeResult, document: Mapping[str, Any] | None) -> dict[str, Any]:
    usage = result.prompt_tokens, result.generated_tokens, result.cost
    return _context(result, usage, document, truncated_by=truncated_by(result), num_steps=result.num_steps)


def _step(stage: StageResult, document: Mapping[str, Any] | None, result: EpisodeResult) -> dict[str, Any]:
    metrics = document["final_metrics"] if document is not None else {}
    usage = [metrics.get(f"total_{name}") for name in ("prompt_tokens", "completion_tokens", "cost_usd")]
    return {
        "step_name": stage.name,
        "agent_result": _context(result, usage, document, truncated_by=stage.truncated_by, num_steps=stage.num_steps),
        "verifier_result": _rewards(stage.reward, stage.rewards),
        "exception_info": _exception(timeout_error(stage.truncated_by), result.finished_at),
        "agent_execution": None,
        "verifier": None,
    }


def _context(
    result: EpisodeResult, usage: Sequence[float | None], document: Mapping[str, Any] | None, **metadata: Any
) -> dict[str, Any]:
    """Usage and token ids of an agent; in `metadata` what Harbor has no place for."""
    names = ("episode_id", "attempt", "retry", "seed", "container_image")
    kept = {**{name: getattr(result, name) for name in names}, "outcome": result.outcome.value, **metadata}
    prompt, generated, cost = usage
    return {
        "n_input_tokens": prompt,
        "n_cache_tokens": None,
        "n_output_tokens": generated,
        "cost_usd": cost,
        "model_usage": None,
        "rollout_details": _rollout_details(document) if document is not None else None,
        "metadata": {"ares_exp": kept},
    }


def _rollout_details(document: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Token ids and log-probabilities of every turn, where every turn has them."""
    turns = [step["metrics"] for step in document["steps"] if "metrics" in step]
    names = ("prompt_token_ids", "completion_token_ids", "logprobs")
    details = {name: [turn[name] for turn in turns] for name in names if all(turn.get(name) for turn in turns)}
    return [details] if turns and "completion_token_ids" in details else None


def _rewards(reward: float | None, rewards: Mapping[str, float]) -> dict[str, Any] | None:
    return None if reward is None else {"rewards": dict(rewards) or {"reward": reward}}
