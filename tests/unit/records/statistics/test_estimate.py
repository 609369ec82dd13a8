"""Means with intervals: against published numbers, scipy, and the formulas written out."""

import math
from statistics import variance

import pytest
import scipy

from ares_exp.records.statistics.estimate import mean_over_attempts, mean_over_tasks, t_quantile, two_sided_p, wilson


@pytest.mark.parametrize(
    ("passed", "of", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_matches_newcombes_published_intervals(passed: int, of: int, low: float, high: float) -> None:
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3."""
    assert wilson(passed / of, of) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("passed", "of"), [(0, 1), (1, 1), (4, 6), (6, 6), (50, 164)])
def test_single_attempts_match_scipys_wilson_interval(passed: int, of: int, level: float) -> None:
    expected = scipy.stats.binomtest(passed, of).proportion_ci(level, method="wilson")
    found = mean_over_attempts([[1.0]] * passed + [[0.0]] * (of - passed), level=level)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert (found.value, found.tasks, found.attempts) == (pytest.approx(passed / of), of, of)


def test_identical_attempts_add_no_information() -> None:
    once, often = ([[one] * n for one in (1.0, 1.0, 0.0, 1.0, 0.0, 1.0)] for n in (1, 8))
    a, b = mean_over_attempts(once), mean_over_attempts(often)
    assert a is not None
    assert b is not None
    assert (b.low, b.high) == pytest.approx((a.low, a.high))
    assert b.attempts == 8 * a.attempts


def test_attempts_count_as_far_as_tasks_agree() -> None:
    tasks = [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]] * 10
    found = mean_over_attempts(tasks)
    assert found is not None
    assert (found.low, found.high) == pytest.approx(wilson(0.5, 80))  # never better than independent attempts


def test_clustered_interval_matches_its_documented_formula() -> None:
    tasks = [[1.0, 0.0, 1.0, 1.0]] * 9 + [[1.0, 1.0, 1.0, 1.0]] * 5 + [[0.0, 0.0, 0.0, 1.0]] * 6
    means = [sum(own) / 4 for own in tasks]
    center = sum(means) / 20
    ratio = scipy.stats.norm.ppf(0.975) / scipy.stats.t.ppf(0.975, 19)
    observations = center * (1 - center) / (variance(means) / 20) * ratio**2
    assert 20 < observations < 80
    found = mean_over_attempts(tasks)
    assert found is not None
    assert found.value == pytest.approx(center)
    assert (found.low, found.high) == pytest.approx(wilson(center, observations))


def test_other_scales_use_students_interval() -> None:
    tasks = [[12.0, 14.0], [9.0, 9.0], [20.0, 16.0], [11.0, 13.0]]
    means = [13.0, 9.0, 18.0, 12.0]
    expected = scipy.stats.ttest_1samp(means, 0).confidence_interval(0.95)
    found = mean_over_attempts(tasks)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((13.0, expected.low, expected.high))


def test_unequal_attempts_are_weighted_as_a_ratio() -> None:
    """V = T / (T - 1) * sum (S_i - n_i m)² / N², by hand."""
    tasks = [[2.0, 4.0, 6.0], [8.0], [1.0, 3.0]]
    center = 24 / 6
    spread = 3 / 2 * ((12 - 3 * center) ** 2 + (8 - center) ** 2 + (4 - 2 * center) ** 2) / 36
    half = scipy.stats.t.ppf(0.975, 2) * math.sqrt(spread)
    found = mean_over_attempts(tasks)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((center, center - half, center + half))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("attempts", [1, 4])
def test_equal_rewards_have_a_nonempty_interval(reward: float, attempts: int) -> None:
    found = mean_over_attempts([[reward] * attempts] * 6)
    assert found is not None
    assert (found.low, found.high) == pytest.approx(wilson(reward, 6))


def test_equal_rewards_on_other_scales_have_none() -> None:
    found = mean_over_attempts([[7.1], [7.1], [7.1]])
    assert found is not None
    assert (found.value, found.low, found.high) == (pytest.approx(7.1), None, None)


def test_single_task_uses_the_variance_of_attempts() -> None:
    found = mean_over_attempts([[1.0, 0.0, 1.0, 1.0]])
    assert found is not None
    assert (found.unit, found.tasks, found.attempts) == ("attempts", 1, 4)
    assert (found.low, found.high) == pytest.approx(wilson(0.75, 4))
    other = mean_over_attempts([[50.0]])
    assert other is not None
    assert (other.value, other.low, other.high) == (50.0, None, None)


def test_missing_scores_give_no_estimate() -> None:
    assert mean_over_attempts([]) is None
    assert mean_over_attempts([[], []]) is None


def test_tasks_without_scores_are_ignored() -> None:
    assert mean_over_attempts([[1.0], [], [0.0]]) == mean_over_attempts([[1.0], [0.0]])


@pytest.mark.parametrize("huge", [1e200, 1.7e308])
def test_huge_numbers_have_no_interval(huge: float) -> None:
    found = mean_over_attempts([[huge], [huge], [-huge]])
    assert found is not None
    assert math.isfinite(found.value)
    assert (found.low, found.high) == (None, None)


def test_skewed_rewards_of_few_tasks_widen_the_interval() -> None:
    values = [1.0] * 18 + [0.9, 0.5]
    trusting = mean_over_tasks(values, attempts=160)
    careful = mean_over_tasks(values, attempts=160, is_skewed=True)
    assert careful.low is not None
    assert trusting.low is not None
    assert careful.low < trusting.low
    assert (careful.low, careful.high) == pytest.approx(wilson(sum(values) / 20, 20))


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 29, 100, 1_000, 49_999])
def test_quantiles_and_tails_match_scipy(freedom: int) -> None:
    for probability in (0.5, 0.51, 0.75, 0.9, 0.975, 0.995, 0.9999, 0.1, 0.025):
        expected = scipy.special.stdtrit(freedom, probability)
        assert t_quantile(freedom, probability) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    for value in (0.0, 1e-9, 0.1, 0.7, 1.96, 3.0, 8.5, 40.0, 1e4):
        expected = 2 * scipy.special.stdtr(freedom, -value)
        assert two_sided_p(freedom, value) == pytest.approx(expected, rel=1e-7, abs=1e-300)
