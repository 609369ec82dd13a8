"""The names and values of what trackers record: a row per finished episode, and the totals of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ares_exp.results import EpisodeResult, RunSummary


class EpisodeRows:
    """Turns finished episodes into rows with running totals."""

    def __init__(self) -> None:
        """No episode yet."""
        self._outcomes: Counter[str] = Counter()
        self._reward_sum = 0.0
        self._scored = 0

    def add(self, result: EpisodeResult) -> dict[str, float]:
        """The row of one more finished episode; what is not known is left out, never 0."""
        self._outcomes[result.outcome.value] += 1
        row = {
            "episode/num_steps": result.num_steps,
            "episode/duration_sec": result.duration_sec,
            "episode/prompt_tokens": result.prompt_tokens,
            "episode/generated_tokens": result.generated_tokens,
            "episode/cost": result.cost,
            "progress/finished": self._outcomes.total(),
            **{f"outcome/{outcome}": count for outcome, count in self._outcomes.items()},
        }
        if result.reward is not None:
            self._reward_sum += result.reward
            self._scored += 1
            row["episode/reward"] = result.reward
            row["progress/mean_reward"] = self._reward_sum / self._scored
        return row


def total_metrics(summary: RunSummary) -> dict[str, Any]:
    """The totals of a run as flat `run/…` metrics."""
    return dict(_flat("run", summary.to_dict()))


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}/{key}", value)
        else:
            yield f"{prefix}/{key}", value
