"""pass@k and pass^k: unbiased, by counting every choice of k attempts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ares_exp.records.statistics.estimate import wilson
from ares_exp.records.statistics.task_statistics import ks_up_to, pass_at_k, pass_hat_k, pass_rates

EVERY = [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]


def test_they_are_shares_of_all_choices() -> None:
    for n, c, k in EVERY:
        choices = list(combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))
        assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, choices)) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(200, 13, 10), (200, 199, 100), (100, 0, 5), (1000, 1, 1000)])
def test_pass_at_k_is_the_program_of_its_paper(n: int, c: int, k: int) -> None:
    """Chen et al. 2021, figure 3."""
    expected = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_the_naive_estimate_would_be_biased() -> None:
    """`1 - (1 - c/n)^k` is too low; of a coin tossed 4 times the mean over all outcomes is not 3/4."""
    outcomes = [(c, ways / 16) for c, ways in enumerate((1, 4, 6, 4, 1))]
    assert sum(share * pass_at_k(4, c, 2) for c, share in outcomes) == pytest.approx(0.75)
    assert sum(share * pass_hat_k(4, c, 2) for c, share in outcomes) == pytest.approx(0.25)
    assert sum(share * (1 - (1 - c / 4) ** 2) for c, share in outcomes) < 0.70


@pytest.mark.parametrize(
    ("attempts", "ks"), [(0, ()), (1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (10, (1, 2, 4, 8, 10))]
)
def test_ks_double_up_to_the_number_of_attempts(attempts: int, ks: tuple[int, ...]) -> None:
    assert ks_up_to(attempts) == ks


def test_the_mean_is_over_tasks_with_enough_attempts() -> None:
    once, four = pass_rates([(4, 4), (4, 1), (2, 1), (1, 0)], [1, 4])
    assert once.pass_at_k is not None
    assert four.pass_at_k is not None
    assert four.pass_hat_k is not None
    assert (once.pass_at_k.tasks, once.pass_at_k.attempts) == (4, 11)
    assert once.pass_at_k.value == pytest.approx((1 + 0.25 + 0.5 + 0) / 4)
    assert (four.pass_at_k.tasks, four.pass_at_k.attempts) == (2, 8)
    assert (four.pass_at_k.value, four.pass_hat_k.value) == (1.0, 0.5)


def test_without_such_a_task_there_is_no_rate() -> None:
    rate = pass_rates([(1, 1), (3, 0)], [4])[0]
    assert (rate.pass_at_k, rate.pass_hat_k) == (None, None)


def test_all_tasks_that_pass_are_no_certainty() -> None:
    rate = pass_rates([(4, 4)] * 6, [2])[0]
    assert rate.pass_hat_k is not None
    assert (rate.pass_hat_k.low, rate.pass_hat_k.high) == pytest.approx(wilson(1.0, 6))


def test_of_one_task_the_ends_follow_those_of_its_probability() -> None:
    low, high = wilson(0.5, 4)
    rate = pass_rates([(4, 2)], [2])[0]
    assert rate.pass_at_k is not None
    assert rate.pass_hat_k is not None
    assert (rate.pass_at_k.low, rate.pass_at_k.high) == pytest.approx((1 - (1 - low) ** 2, 1 - (1 - high) ** 2))
    assert (rate.pass_hat_k.low, rate.pass_hat_k.high) == pytest.approx((low**2, high**2))
    assert rate.pass_at_k.unit == "attempts"


def test_an_interval_holds_its_own_estimate() -> None:
    for n, c, k in EVERY:
        _check_interval([(n, c)], k)
        _check_interval([(n, c), (n, n), (n, 0)], k)


def _check_interval(counts: list[tuple[int, int]], k: int) -> None:
    rate = pass_rates(counts, [k])[0]
    for found in (rate.pass_at_k, rate.pass_hat_k):
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert 0 <= found.low <= found.value <= found.high <= 1
        assert found.low < found.high
