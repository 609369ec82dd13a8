from __future__ import annotations

import pytest

from ares_exp.errors import ConfigError
from ares_exp.records.results import Outcome
from ares_exp.records.run_summary import RunSummary
from ares_exp.records.statistics.metric_estimates import check_objective, known_metrics, objective
from tests.unit.runs.sweeps.recorded_job import result


def test_an_attempt_without_a_reward_counts_as_zero() -> None:
    summary = RunSummary(2, (result("a", 0, 1.0), result("b", 0, None, Outcome.AGENT_ERROR)))
    assert objective(summary, "mean_reward") == 0.5
    assert objective(summary, "scored_only/mean_reward") == 1.0
    assert objective(RunSummary(2, ()), "mean_reward") is None


def test_the_metrics_that_there_are() -> None:
    assert {"mean_reward", "pass@1", "pass@2", "cost_mean", "scored_only/pass^2"} <= set(known_metrics(3))
    assert "pass@4" not in known_metrics(3)
    check_objective("pass@2", attempts=2)
    with pytest.raises(ConfigError, match=r"no metric `objective=pass@2` with attempts=1.*Did you mean `pass@1`"):
        check_objective("pass@2", attempts=1)
