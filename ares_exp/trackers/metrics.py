"""The metrics of a run, for trackers and for the objective of a sweep.

They are the metrics of each finished episode, the totals of a run, and its statistics (such as `stat/mean_reward`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ares_exp.errors import ConfigError, close_matches
from ares_exp.records.results import EpisodeResult, Outcome, RunSummary
from ares_exp.records.statistics.estimate import Estimate
from ares_exp.records.statistics.run_statistics import RunStatistics, Scores, mean_scores

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
    return dict(_flat("run", summary.to_dict())) | _metrics(summary)


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


DEFAULT = "mean_reward"
PREFIX = "stat/"

PHASES = ("start", "agent", "policy", "verify")


def metrics(statistics: RunStatistics) -> dict[str, float]:
    """Returns the statistics of a run by metric name: `stat/mean_reward`, `stat/mean_reward_low`, `stat/pass@2`, ….

    An attempt without a reward counts as reward 0. If there are such attempts, `stat/scored_only/…` are the same
    metrics without them. Unknown values are omitted.
    """
    found = {
        "stat/attempts": float(statistics.attempts),
        "stat/tries": float(statistics.tries),
        "stat/tasks": float(len(statistics.tasks)),
        "stat/flaky_tasks": float(len(statistics.flaky)),
        "stat/scored": float(statistics.scored_only.attempts),
    }
    found.update(_scores("stat", statistics.errors_as_zero))
    if statistics.scored_only.attempts < statistics.errors_as_zero.attempts:
        found.update(_scores("stat/scored_only", statistics.scored_only))
    for name in ("tokens", "cost", "num_steps", "seconds"):
        spread = getattr(statistics, name)
        found |= {f"stat/{name}_{measure}": getattr(spread, measure) for measure in ("mean", "median", "p95")}
    return found | {f"stat/seconds_{phase}_mean": spread.mean for phase, spread in statistics.phase_sec.items()}


def added_metrics(results: Sequence[EpisodeResult], added: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns metrics of the rewards that `ares-exp score` added: means, and bounds (`stat/rewards/judge_low`)."""
    means = mean_scores(results, added)
    return {key: value for name, mean in means for key, value in _estimate(f"stat/rewards/{name}", mean)}


def _scores(prefix: str, scores: Scores) -> Iterator[tuple[str, float]]:
    yield from _estimate(f"{prefix}/mean_reward", scores.mean_reward)
    for rate in scores.pass_rates:
        yield from _estimate(f"{prefix}/pass@{rate.k}", rate.pass_at_k)
        yield from _estimate(f"{prefix}/pass^{rate.k}", rate.pass_hat_k)


def _estimate(name: str, estimate: Estimate | None) -> Iterator[tuple[str, float]]:
    if estimate is None:
        return
    yield name, estimate.value
    if estimate.low is not None and estimate.high is not None:
        yield f"{name}_low", estimate.low
        yield f"{name}_high", estimate.high


def objective(summary: RunSummary, name: str) -> float | None:
    """Returns the value of one metric of a run, such as `mean_reward`; `None` if it cannot be computed.

    `known_metrics` returns the possible names. In `mean_reward` and the pass rates, an attempt without a reward counts
    as 0. If such attempts were ignored, a job with errors in hard tasks could have the best value of a sweep.
    """
    return _metrics(summary).get(PREFIX + name)


def known_metrics(attempts: int) -> list[str]:
    """Returns the names of all metrics that a run with this number of attempts per task has."""
    results = tuple(
        EpisodeResult("any", task, attempt, 0, Outcome.COMPLETED, reward, phase_sec=dict.fromkeys(PHASES, 0.0))
        for task, reward in (("solved", 1.0), ("unscored", None))
        for attempt in range(attempts)
    )
    return [name.removeprefix(PREFIX) for name in _metrics(RunSummary(len(results), results))]


def check_objective(name: str, *, attempts: int) -> None:
    """Raises `ConfigError` if there is no metric `name`. The message lists the existing metrics."""
    if name not in (known := known_metrics(attempts)):
        raise ConfigError(
            f"There is no metric `objective={name}` with attempts={attempts}.{close_matches(name, known)} "
            f"Choose one of {', '.join(name for name in known if not name.endswith(('_low', '_high')))}."
        )


def _metrics(summary: RunSummary) -> dict[str, float]:
    return metrics(RunStatistics.of(summary.results, planned=summary.planned, threshold=summary.threshold))
