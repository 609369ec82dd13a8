"""The statistics of a run under flat names, for trackers."""

from __future__ import annotations

from collections.abc import Iterator

from ares_exp.records.statistics.estimate import Estimate
from ares_exp.records.statistics.run_statistics import RunStatistics, Scores


def metrics(statistics: RunStatistics) -> dict[str, float]:
    """Flattens the statistics: `stat/mean_reward`, `stat/mean_reward_low`, `…_high`, `stat/pass@2` …, and so on.

    Errors count as zero; where attempts have no reward, `stat/scored_only/…` has the same without them. What is not
    known has no name.
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
