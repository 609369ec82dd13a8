"""Conversion of finished episodes to JSON, for the lines of `GET /v1/episodes`."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ares_exp.errors import UntrainableError, may_pass
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.training.sampled_calls import Accepted, SampledCall, calls_of
from ares_exp.training.sequences import TrainingSequence, sequences_of
from ares_exp.training.service.bodies import ErrorFacts, Stage, State, SubmissionBody
from ares_exp.trajectories.records import EpisodeTrajectory

if TYPE_CHECKING:
    from ares_exp.training.driver import DrivenEpisode

STATES: Mapping[Outcome, State] = {
    Outcome.COMPLETED: "finished",
    Outcome.TRUNCATED: "truncated",
    Outcome.CANCELLED: "cancelled",
    Outcome.CLOSED: "cancelled",
}
"""The state of a rollout for each outcome of its episode. All other outcomes result in the state `failed`."""
STAGES: Mapping[Outcome, Stage] = {
    Outcome.POLICY_ERROR: "policy",
    Outcome.VERIFIER_ERROR: "verify",
}


def state_of(result: EpisodeResult) -> State:
    """Returns the state of a rollout whose episode has this result."""
    return STATES.get(result.outcome, "failed")


def error_of(result: EpisodeResult) -> ErrorFacts | None:
    """Returns the error of a failed or cancelled episode; `None` for other episodes."""
    if result.error is None or state_of(result) in ("finished", "truncated"):
        return None
    stage: Stage = STAGES.get(result.outcome, "agent" if result.num_steps else "start")
    kind = result.error.type
    is_transient = may_pass(kind) or result.outcome is Outcome.LOST
    return ErrorFacts(stage=stage, type=kind, message=result.error.message, transient=is_transient)


def episode_fields(
    episode: DrivenEpisode, body: SubmissionBody, *, temperature: float | None, submitted_at: float
) -> dict[str, Any]:
    """Returns the fields of a line that describe its episode. This takes much CPU time for long episodes.

    Args:
        episode: Finished episode.
        body: Submission of the rollout, which selects the content.
        temperature: Temperature at which the tokens were sampled; `None` if it is unknown.
        submitted_at: Time of the submission, in epoch seconds.
    """
    result, error = episode.result, error_of(episode.result)
    content: dict[str, Any] = {}
    if body.want != "reward":
        try:
            content = _content(episode.trajectory, body, temperature)
        except UntrainableError as untrainable:
            error = error or ErrorFacts(
                stage="rows", type=type(untrainable).__name__, message=str(untrainable), transient=False
            )
    spent = result.phase_sec
    return {
        "attempt": result.attempt,
        "episode_id": result.episode_id,
        "reward": result.reward,
        "rewards": dict(result.rewards),
        "trainable": result.reward is not None and (body.want == "reward" or any(content.values())),
        "error": error.model_dump() if error is not None else None,
        "versions": list(episode.versions),
        "finish": "submitted" if result.outcome is Outcome.COMPLETED else result.limit,
        **content,
        "times": {
            "queue": round(max(0.0, result.started_at - submitted_at), 3),
            "start": round(spent.get("start", 0.0), 3),
            "engine": round(spent.get("policy", 0.0), 3),
            "tools": round(spent.get("agent", 0.0), 3),
            "verify": round(spent.get("verify", 0.0) + spent.get("score", 0.0), 3),
        },
        "tokens": {"prompt": result.prompt_tokens, "sampled": result.generated_tokens},
    }


def _content(trajectory: EpisodeTrajectory | None, body: SubmissionBody, temperature: float | None) -> dict[str, Any]:
    """Returns the content that `body.want` requests. Raises `UntrainableError` for missing or untrainable calls."""
    if trajectory is None:
        raise UntrainableError("The episode has no trajectory.")
    if body.want == "trajectory":
        return {"trajectory": trajectory.to_dict()}
    if body.want == "calls":
        accepted = Accepted(body.conversations, temperature)
        return {"calls": [_call(call, body.encoding) for call in calls_of(trajectory, accepted)]}
    report = sequences_of(
        trajectory, conversations=body.conversations, realign_tokens=body.realign_tokens, temperature=temperature
    )
    rows = [row_of(row, body.encoding, body.limits.row_tokens) for row in report.rows]
    return {"rows": [row for row in rows if row is not None]}


def row_of(row: TrainingSequence, encoding: str, limit: int | None = None) -> dict[str, Any] | None:
    """Returns a row as JSON-ready data, cut to `limit` tokens; `None` if the cut row has no sampled token."""
    length = len(row.ids) if limit is None else min(limit, len(row.ids))
    starts = [start for start in row.starts if start < length]
    if not starts:
        return None
    return {
        "conversation": row.conversation,
        "made": row.made,
        "ids": _encoded(encoding, "i", row.ids[:length]),
        "mask": _encoded(encoding, "B", row.mask[:length]),
        "logprobs": _encoded(encoding, "f", row.logprobs[:length]),
        "prompt_tokens": row.starts[0],
        "steps": list(row.steps[: len(starts)]),
        "starts": starts,
        "versions": list(row.policy_versions),
        "finish_reason": row.finish_reason if length == len(row.ids) else "length",
        "cut": len(row.ids) - length,
    }


def _call(call: SampledCall, encoding: str) -> dict[str, Any]:
    return {
        "step": call.step,
        "conversation": call.conversation,
        "prompt_ids": _encoded(encoding, "i", call.prompt),
        "ids": _encoded(encoding, "i", call.completion),
        "logprobs": _encoded(encoding, "f", call.logprobs),
        "version": call.policy_version,
        "finish_reason": call.finish_reason,
    }


def _encoded(encoding: str, kind: str, values: Sequence[Any]) -> list[Any] | str:
    """Encodes values as base64, little-endian, if the encoding is `packed`, otherwise as a list.

    `kind` is an array type (`i`: int32, `B`: uint8, `f`: float32).
    """
    if encoding != "packed":
        return list(values)
    made = array(kind, values)
    if sys.byteorder == "big":
        made.byteswap()
    return base64.b64encode(made.tobytes()).decode()
