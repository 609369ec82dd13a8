"""The metrics that trackers record: metrics of each finished episode, and the totals of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ares_exp.records.results import EpisodeResult, RunSummary

ATTEMPT_VALUES = ("reward", "num_steps", "duration_sec", "prompt_tokens", "generated_tokens", "cost")
"""Fields of an attempt's result that are shown as histograms over the attempts."""


class EpisodeRows:
    """Creates the metrics of finished episodes, together with totals of the run so far.

    If an attempt has several episodes because of retries, only its last episode counts in the totals.

    Attributes:
        finished: Number of finished episodes so far, including earlier sessions.
    """

    def __init__(self, earlier: Iterable[EpisodeResult] = ()) -> None:
        """Starts with the results of earlier sessions, which count in the totals."""
        self.finished = 0
        self._outcomes: Counter[str] = Counter()
        self._last: dict[tuple[str, int], tuple[int, str, float | None]] = {}
        self._reward_sum = 0.0
        self._scored = 0
        for result in earlier:
            self.add(result)

    def add(self, result: EpisodeResult) -> dict[str, float]:
        """Returns the metrics to log for a finished episode. Unknown values are omitted, not 0."""
        self.finished += 1
        self._count(result)
        row = {
            "episode/num_steps": result.num_steps,
            "episode/duration_sec": result.duration_sec,
            "episode/prompt_tokens": result.prompt_tokens,
            "episode/generated_tokens": result.generated_tokens,
            "episode/cost": result.cost,
            "progress/finished": self.finished,
            **{f"outcome/{outcome}": count for outcome, count in self._outcomes.items()},
        }
        if (used := result.environment_usage) is not None:
            row["episode/environment_tokens"] = used.tokens
            row["episode/environment_cost"] = used.cost
        for name, value in result.rewards.items():
            if name != "reward" or value != result.reward:  # `episode/reward` has it already
                row[f"episode/rewards/{name}"] = value
        if result.reward is not None:
            row["episode/reward"] = result.reward
            row["progress/mean_reward"] = self._reward_sum / self._scored
        return row

    def _count(self, result: EpisodeResult) -> None:
        """Adds a result to the totals so far, in place of the result of an earlier episode of the same attempt."""
        slot = result.task_name, result.attempt
        if (before := self._last.get(slot)) is not None:
            if result.retry < before[0]:
                return
            self._add(before[1], before[2], -1)
        self._last[slot] = result.retry, result.outcome.value, result.reward
        self._add(result.outcome.value, result.reward, 1)

    def _add(self, outcome: str, reward: float | None, times: int) -> None:
        self._outcomes[outcome] += times
        if reward is not None:
            self._reward_sum += times * reward
            self._scored += times


def total_metrics(summary: RunSummary) -> dict[str, Any]:
    """Returns the totals of a run (with names such as `run/…`) and its statistics (`stat/…`) as metrics."""
    from ares_exp.records.statistics.metric_estimates import metrics
    from ares_exp.records.statistics.run_statistics import RunStatistics

    statistics = RunStatistics.of(summary.results, planned=summary.planned, threshold=summary.threshold)
    return dict(_flat("run", summary.to_dict())) | metrics(statistics)


def attempt_values(summary: RunSummary) -> dict[str, list[float]]:
    """Returns lists of values for histograms: for each field in `ATTEMPT_VALUES`, the finite values of all attempts.

    The value of an attempt is the value of its last episode.
    """
    final = summary.final
    values = {name: [getattr(result, name) for result in final] for name in ATTEMPT_VALUES}
    return {name: [one for one in all_ if one is not None and math.isfinite(one)] for name, all_ in values.items()}


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}/{key}", value)
        else:
            yield f"{prefix}/{key}", value
