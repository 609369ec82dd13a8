"""Errors of trials in Harbor's terms.

An error keeps the name of its class; where Harbor has the same error, it has the same name. The time limit is Harbor's
`AgentTimeoutError`, beside which a reward stands. Harbor has no error for limits on steps, tokens and cost: its own
agents just end at them, so there is none here either, and `agent_result.metadata` names the limit. An attempt without a
result (cancelled, closed, lost, abandoned) has a `CancelledError`.
"""

from __future__ import annotations

from ares_exp.records.results import UNFINISHED, EpisodeResult, ErrorInfo, Outcome

AGENT_TIMEOUT = "AgentTimeoutError"
CANCELLED = "CancelledError"


def truncated_by(result: EpisodeResult) -> str | None:
    """Returns the limit that cut an episode short: `time`, `steps`, `tokens`, `cost`; `None` if none did."""
    return result.limit if result.outcome is Outcome.TRUNCATED else None


def trial_error(result: EpisodeResult) -> ErrorInfo | None:
    """Returns the error of a trial; `None` if it has none."""
    error = result.error
    if result.outcome in UNFINISHED:
        return ErrorInfo(CANCELLED, f"{result.outcome.value}: {error.message if error is not None else 'no result'}")
    if result.outcome is Outcome.TRUNCATED:
        return None if result.stages else timeout_error(truncated_by(result))
    return error


def timeout_error(limit: str | None) -> ErrorInfo | None:
    """Returns the error of an agent that was cut short by a limit, if the limit is the time."""
    return ErrorInfo(AGENT_TIMEOUT, "The agent reached its time limit.") if limit == "time" else None
