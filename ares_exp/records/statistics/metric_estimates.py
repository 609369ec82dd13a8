"""The statistics of a run as metrics with names such as `stat/mean_reward`, for trackers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ares_exp.errors import ConfigError, close_matches
from ares_exp.records.results import EpisodeResult, Outcome, RunSummary
from ares_exp.records.statistics.estimate import Estimate
from ares_exp.records.statistics.run_statistics import RunStatistics, Scores, mean_scores

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
