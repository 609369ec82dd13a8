"""The ending of an episode: outcome, error and reward, decided here for its row and its trajectory alike."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from ares_exp.records.results import ErrorInfo, Outcome


class LastStep(Protocol):
    """The LAST time step of an episode, or its record; it may be of another package's class."""

    @property
    def reward(self) -> Any: ...  # noqa: D102
    @property
    def discount(self) -> Any: ...  # noqa: D102


class Ending(NamedTuple):
    """How an episode ended.

    Attributes:
        outcome: The outcome.
        error: What went wrong, or the limit that truncated it; `None` when it was completed.
        reward: The reward of its LAST step; `None` when there is none.
    """

    outcome: Outcome
    error: ErrorInfo | None = None
    reward: float | None = None


def ending(
    last: LastStep | None, failure: BaseException | None = None, *, limit: str | None = None, note: str | None = None
) -> Ending:
    """Decides how an episode ended. A LAST step that was reached counts, whatever came after it.

    Args:
        last: The LAST step; `None` when none was reached.
        failure: The exception that ended the episode, if one did.
        limit: The limit that cut it short, where that is known.
        note: More about that limit.
    """
    if last is None:
        ended = failure or RuntimeError("the episode ended without a LAST step")
        return Ending(Outcome.of(ended), ErrorInfo.of(ended))
    reward = None if last.reward is None else float(last.reward)
    if reward is not None and not math.isfinite(reward):
        return Ending(Outcome.ERRORED, ErrorInfo("ValueError", f"the environment's reward is {reward}"))
    if last.discount:
        return Ending(Outcome.TRUNCATED, ErrorInfo.of_limit(limit, note), reward)
    return Ending(Outcome.COMPLETED, reward=reward)
