"""Episode limits: what an episode may use before it is truncated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ares_exp.tasks.time_limits import TimeLimits

LimitName = Literal["steps", "time", "tokens", "cost"]


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an episode may use before it is truncated. `None` is unlimited.

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

    def reached(self, *, steps: int, tokens: int, cost: float) -> LimitName | None:
        """The first limit that these totals reach, if any."""
        used: tuple[tuple[LimitName, float, float | None], ...] = (
            ("steps", steps, self.steps),
            ("tokens", tokens, self.tokens),
            ("cost", cost, self.cost),
        )
        return next((name for name, amount, limit in used if limit is not None and amount >= limit), None)
