"""The one number that says how good a job is: a metric of its statistics, named without `stat/`."""

from __future__ import annotations

import logging

from ares_exp.errors import ConfigError, close_matches
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.records.run_summary import RunSummary

DEFAULT = "mean_reward"
PREFIX = "stat/"

logger = logging.getLogger(__name__)


def objective(summary: RunSummary, name: str) -> float | None:
    """Returns the metric of that name; `None` when it cannot be computed.

    Args:
        summary: The job's totals. In `mean_reward` and the pass rates an attempt without a reward counts as 0:
            otherwise a job whose hard tasks all fail would win.
        name: A name from `known_metrics`.
    """
    return _metrics(summary).get(PREFIX + name)


def known_metrics(attempts: int) -> list[str]:
    """Lists the metrics of a run with so many attempts per task."""
    results = tuple(
        EpisodeResult("any", task, attempt, 0, Outcome.COMPLETED, reward, phase_sec=dict.fromkeys(PHASES, 0.0))
        for task, reward in (("solved", 1.0), ("unscored", None))
        for attempt in range(attempts)
    )
    return [name.removeprefix(PREFIX) for name in _metrics(RunSummary(len(results), results))]


PHASES = ("start", "agent", "policy", "verify")


def check_objective(name: str, *, attempts: int) -> None:
    """Checks that there is such a metric.

    Raises:
        ConfigError: With those that there are.
    """
    if name == DEFAULT or name in (known := known_metrics(attempts)):
        return
    raise ConfigError(
        f"There is no metric `objective={name}` with attempts={attempts}.{close_matches(name, known)} "
        f"There is {', '.join(name for name in known if not name.endswith(('_low', '_high')))}."
    )


def _metrics(summary: RunSummary) -> dict[str, float]:
    from ares_exp.records.statistics.metric_estimates import metrics
    from ares_exp.records.statistics.run_statistics import RunStatistics

    return metrics(RunStatistics.of(summary.results, planned=summary.planned, threshold=summary.threshold))
