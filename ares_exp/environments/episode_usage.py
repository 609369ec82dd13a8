"""What an episode has used so far."""

from __future__ import annotations

from dataclasses import dataclass

from ares_exp.environments.episode_limits import EpisodeLimits, LimitName
from ares_exp.llms.response import LLMResponse


@dataclass(slots=True)
class EpisodeUsage:
    """The sum over an episode's steps.

    Attributes:
        step_count: Time steps since FIRST.
        unanswered: Those of them without an LLM response: there was none before the time was up.
        tokens: Of the responses.
        cost: Of the responses, in USD.
    """

    step_count: int = 0
    unanswered: int = 0
    tokens: int = 0
    cost: float = 0.0

    def add(self, action: LLMResponse | None) -> None:
        """Counts one step; its response was given, also if it came too late."""
        self.step_count += 1
        if action is None:
            self.unanswered += 1
        else:
            self.tokens += action.usage.total_tokens
            self.cost += action.cost

    def limit_reached(self, limits: EpisodeLimits) -> LimitName | None:
        """The first limit, other than those on time, that does not allow another step."""
        return limits.reached(steps=self.step_count - self.unanswered, tokens=self.tokens, cost=self.cost)
