"""Conversion of finished episodes to JSON, for the lines of `GET /v1/episodes`."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Mapping, Sequence
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
Encode = Callable[[str, Sequence[Any]], Any]


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


def episode_fields(episode: DrivenEpisode, body: SubmissionBody, *, temperature: float | None) -> dict[str, Any]:
    """Returns those fields of a line that depend only on the episode. This takes much CPU time for long episodes.

    Args:
        episode: Finished episode.
        body: Submission of the rollout, which selects the content.
        temperature: Temperature at which the tokens were sampled; `None` if it is unknown.
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
    spent, begun = result.phase_sec, result.started_at
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
            "queue": begun,  # the caller subtracts the time of the submission
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
        accepted, encode = Accepted(body.conversations, temperature), ENCODINGS[body.encoding]
        return {"calls": [_call(call, encode) for call in calls_of(trajectory, accepted)]}
    report = sequences_of(
        trajectory, conversations=body.conversations, realign_tokens=body.realign_tokens, temperature=temperature
    )
    rows = [row_of(row, body.encoding, body.limits.row_tokens) for row in report.rows]
    return {"rows": [row for row in rows if row is not None]}


def row_of(row: TrainingSequence, encoding: str, limit: int | None = None) -> dict[str, Any] | None:
    """Returns a row as JSON-ready data, cut to `limit` tokens; `None` if the cut row has no sampled token."""
    encode = ENCODINGS[encoding]
    length = len(row.ids) if limit is None else min(limit, len(row.ids))
    starts = [start for start in row.starts if start < length]
    if not starts:
        return None
    return {
        "conversation": row.conversation,
        "made": row.made,
        "ids": encode("i", row.ids[:length]),
        "mask": encode("B", row.mask[:length]),
        "logprobs": encode("f", row.logprobs[:length]),
        "prompt_tokens": row.starts[0],
        "steps": list(row.steps[: len(starts)]),
        "starts": starts,
        "versions": list(row.policy_versions),
        "finish_reason": row.finish_reason if length == len(row.ids) else "length",
        "cut": len(row.ids) - length,
    }


def _call(call: SampledCall, encode: Encode) -> dict[str, Any]:
    return {
        "step": call.step,
        "conversation": call.conversation,
        "prompt_ids": encode("i", call.prompt),
        "ids": encode("i", call.completion),
        "logprobs": encode("f", call.logprobs),
        "version": call.policy_version,
        "finish_reason": call.finish_reason,
    }


def _plain(_: str, values: Sequence[Any]) -> list[Any]:
    return list(values)


def _packed(kind: str, values: Sequence[Any]) -> str:
    """Encodes values as base64, little-endian. `kind` is an array type (`i`: int32, `B`: uint8, `f`: float32)."""
    import sys

    made = array(kind, values)
    if sys.byteorder == "big":
        made.byteswap()
    return base64.b64encode(made.tobytes()).decode()


ENCODINGS: Mapping[str, Encode] = {"json": _plain, "packed": _packed}
