"""The statistics of a run, as they go into results.json and to trackers."""

import json
import math
from dataclasses import replace
from itertools import permutations

import pytest

from ares_exp.records.results import UNFINISHED, EpisodeResult, ErrorInfo, Outcome, RunSummary
from ares_exp.records.statistics.run_statistics import RunStatistics, results_document
from ares_exp.trackers.metrics import metrics


def _try(
    task: str, attempt: int, reward: float | None, *, retry: int = 0, error: str = "EndpointError"
) -> EpisodeResult:
    return EpisodeResult(
        episode_id=f"{task}-{attempt}-{retry}",
        task_name=task,
        attempt=attempt,
        seed=0,
        outcome=Outcome.COMPLETED if reward is not None else Outcome.POLICY_ERROR,
        reward=reward,
        error=None if reward is not None else ErrorInfo(error, "it failed"),
        num_steps=4,
        prompt_tokens=100 * (attempt + 1),
        generated_tokens=10,
        cost=0.25,
        started_at=50.0,
        finished_at=60.0 + attempt,
        phase_sec={"agent": 4.0, "verify": 1.0},
        retry=retry,
    )


RESULTS = (
    _try("a", 0, 1.0),
    _try("a", 1, None),  # tried again, and passed
    _try("a", 1, 1.0, retry=1),
    _try("b", 0, 0.0),
    _try("b", 1, None, error="ContainerDiedError"),
    _try("c", 1, 1.0),
    _try("c", 0, 0.5),
)


def test_errors_as_zero_and_scored_only_have_denominators() -> None:
    found = RunStatistics.of(RESULTS, planned=8)
    every, scored = found.errors_as_zero, found.scored_only
    assert (every.tasks, every.attempts, scored.tasks, scored.attempts) == (3, 6, 3, 5)
    assert every.mean_reward is not None
    assert scored.mean_reward is not None
    assert every.mean_reward.value == pytest.approx(3.5 / 6)
    assert scored.mean_reward.value == pytest.approx(3.5 / 5) == RunSummary(8, RESULTS).mean_reward
    once, twice = every.pass_rates
    assert [rate.k for rate in scored.pass_rates] == [1, 2]
    assert once.pass_at_k is not None
    assert twice.pass_at_k is not None
    assert twice.pass_hat_k is not None
    assert (once.pass_at_k.value, twice.pass_at_k.value, twice.pass_hat_k.value) == pytest.approx((1 / 2, 2 / 3, 1 / 3))
    of_two = scored.pass_rates[1].pass_at_k
    assert of_two is not None
    assert (of_two.tasks, of_two.attempts, of_two.value) == (2, 4, 1.0)


@pytest.mark.parametrize("outcome", sorted(UNFINISHED))
def test_cancelled_attempts_are_not_scored(outcome: Outcome) -> None:
    cut = [replace(_try(task, 2, None, error="BudgetExhaustedError"), outcome=outcome) for task in ("a", "d")]
    found, without = RunStatistics.of([*RESULTS, *cut], planned=8), RunStatistics.of(RESULTS, planned=8)
    assert (found.errors_as_zero, found.scored_only) == (without.errors_as_zero, without.scored_only)
    assert (found.attempts, found.outcomes[outcome]) == (without.attempts + 2, 2)


def test_threshold_defines_a_pass_and_excludes_errors() -> None:
    found = RunStatistics.of(RESULTS, planned=6, threshold=0.5)
    assert [task.passed for task in found.tasks] == [2, 0, 2]
    nought = RunStatistics.of(RESULTS, planned=6, threshold=0.0)
    assert [(task.passed, task.attempts) for task in nought.tasks] == [(2, 2), (1, 2), (2, 2)]


def test_variation_is_reported_per_task() -> None:
    found = RunStatistics.of(RESULTS, planned=6)
    a, b, c = found.tasks
    assert (a.passed, a.scored, a.pass_variance, a.is_flaky, a.tries) == (2, 2, 0.0, False, 3)
    assert (b.passed, b.scored, b.attempts, b.is_flaky) == (0, 1, 2, False)  # an error is not an attempt that failed
    assert (c.rewards, c.passed, c.pass_rate, c.pass_variance) == ((0.5, 1.0), 1, 0.5, 0.25)
    assert found.flaky == ("c",)


def test_tries_outcomes_and_errors_are_counted() -> None:
    found = RunStatistics.of(RESULTS, planned=8)
    assert (found.planned, found.attempts, found.tries, found.retried) == (8, 6, 7, 1)
    assert found.outcomes == {"completed": 5, "policy_error": 1}
    assert found.errors == {"ContainerDiedError": 1}
    assert found.retried_errors == {"EndpointError": 1}


def test_tokens_cost_and_seconds_are_summarized() -> None:
    found = RunStatistics.of([_try("a", n, 1.0) for n in range(21)], planned=21)
    assert (found.tokens.mean, found.tokens.median, found.tokens.total) == (1110.0, 1110.0, 23310.0)
    assert found.tokens.p95 == 2010.0  # the 20th of 21
    assert (found.cost.total, found.seconds.mean) == (5.25, 20.0)
    assert (found.phase_sec["agent"].total, found.phase_sec["verify"].count) == (84.0, 21)


def test_order_of_results_is_irrelevant() -> None:
    tries = [RESULTS[0], *RESULTS[3:]]
    expected = RunStatistics.of(tries, planned=6)
    for order in list(permutations(tries))[:60]:
        found = RunStatistics.of(order, planned=6)
        assert replace(found, outcomes={}, errors={}) == replace(expected, outcomes={}, errors={})


def test_empty_results_have_no_numbers() -> None:
    found = RunStatistics.of((), planned=3)
    assert (found.errors_as_zero.mean_reward, found.errors_as_zero.pass_rates, found.tasks) == (None, (), ())
    json.dumps(results_document(RunSummary(3, ())), allow_nan=False)
    assert "stat/mean_reward" not in metrics(found)


def test_results_json_has_totals_statistics_and_tasks() -> None:
    document = results_document(RunSummary(6, RESULTS, wall_sec=12.0))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["schema_version"] == 1
    assert document["totals"] == RunSummary(6, RESULTS, wall_sec=12.0).to_dict()
    assert document["statistics"]["flaky"] == ["c"]
    assert document["statistics"]["errors_as_zero"]["attempts"] == 6
    assert document["statistics"]["scored_only"]["pass_rates"][1]["k"] == 2
    assert [row["task_name"] for row in document["tasks"]] == ["a", "b", "c"]
    assert document["tasks"][1] == {
        "task_name": "b",
        "rewards": [0.0, None],
        "passed": 0,
        "mean_reward": 0.0,
        "outcomes": {"completed": 1, "policy_error": 1},
        "errors": {"ContainerDiedError": 1},
        "tries": 2,
        "num_steps": 4.0,
        "tokens": 160.0,
        "cost": 0.25,
        "seconds": 10.5,
        "attempts": 2,
        "scored": 1,
        "pass_rate": 0.0,
        "pass_variance": 0.0,
        "flaky": False,
    }


@pytest.mark.parametrize("reward", [1.7e308, -1e300, 5e-324])
def test_rewards_of_any_size_are_valid_json(reward: float) -> None:
    results = [_try(task, n, sign * reward) for task, sign in (("a", 1), ("b", 1), ("c", -1)) for n in range(2)]
    json.dumps(results_document(RunSummary(6, tuple(results)))["statistics"], allow_nan=False)


def test_metrics_are_flat_and_finite() -> None:
    found = metrics(RunStatistics.of(RESULTS, planned=6))
    assert found["stat/mean_reward"] == pytest.approx(3.5 / 6)
    assert found["stat/scored_only/mean_reward"] == pytest.approx(0.7)
    assert found["stat/mean_reward_low"] < found["stat/mean_reward"] < found["stat/mean_reward_high"]
    assert {"stat/pass@2", "stat/pass^2_low", "stat/scored_only/pass@2", "stat/tokens_p95"} <= found.keys()
    assert (found["stat/flaky_tasks"], found["stat/seconds_verify_mean"]) == (1.0, 1.0)
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert not any(name.startswith("stat/scored_only") for name in metrics(RunStatistics.of(RESULTS[:1], planned=1)))
