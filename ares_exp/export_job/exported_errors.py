"""What ended a trial, in Harbor's terms.

An error keeps the name of its class; where Harbor has the same error, it has the same name. The time limit is Harbor's
`AgentTimeoutError`, beside which a reward stands. For limits on steps, tokens and cost Harbor has no error: its own
agents just end when they reach one, so there is none here either, and `agent_result.metadata` tells. Whatever says
nothing about its attempt (cancelled, closed, lost, abandoned) is a `CancelledError`.
"""

from __future__ import annotations

from ares_exp.results import UNFINISHED, EpisodeResult, ErrorInfo, Outcome

AGENT_TIMEOUT = "AgentTimeoutError"
CANCELLED = "CancelledError"
_LIMIT_REACHED = "limit reached: "


def truncated_by(result: EpisodeResult) -> str | None:
    """The limit that cut an episode short: `time`, `steps`, `tokens`, `cost`."""
    if result.outcome is not Outcome.TRUNCATED or result.error is None:
        return None
    return result.error.message.removeprefix(_LIMIT_REACHED)


def trial_error(result: EpisodeResult) -> ErrorInfo | None:
    """What Harbor is told of how an episode ended; `None`: of no error."""
    error = result.error
    if result.outcome in UNFINISHED:
        return ErrorInfo(CANCELLED, f"{result.outcome.value}: {error.message if error is not None else 'no result'}")
    if result.outcome is Outcome.TRUNCATED:
        return None if result.stages else timeout_error(truncated_by(result))
    return error


def timeout_error(limit: str | None) -> ErrorInfo | None:
    """The error of an agent that a limit cut short, if it was time."""
    if limit != "time":
        return None
    return ErrorInfo(AGENT_TIMEOUT, "The agent reached its time limit.")
