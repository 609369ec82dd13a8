"""Limits of an episode: steps, tokens, cost and time."""

from __future__ import annotations

from dataclasses import dataclass, field

from ares_exp.environment import LimitName
from ares_exp.records.results import EpisodeUsage
from ares_exp.tasks.verification.time_limits import TimeLimits


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode, which is truncated when it reaches one. `None` is unlimited.

    Attributes:
        steps: LLM responses.
        tokens: Prompt and generated tokens together, over all responses.
        cost: US dollars over all responses.
        time: Wall-clock limits of the phases.
        verify_on_truncation: Whether a truncated episode is verified; if not, its reward is `None`.
    """

    steps: int | None = None
    tokens: int | None = None
    cost: float | None = None
    time: TimeLimits = field(default_factory=TimeLimits)
    verify_on_truncation: bool = True

    def reached(self, usage: EpisodeUsage) -> LimitName | None:
        """Finds the first limit, other than those on time, that the usage reaches: it allows no further step."""
        used: tuple[tuple[LimitName, float, float | None], ...] = (
            ("steps", usage.num_steps, self.steps),
            ("tokens", usage.tokens, self.tokens),
            ("cost", usage.cost, self.cost),
        )
        return next((name for name, amount, limit in used if limit is not None and amount >= limit), None)
