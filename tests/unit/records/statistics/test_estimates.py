"""Paired differences, power, and pass rates, compared with published examples and scipy."""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import pytest
import scipy

from ares_exp.records.statistics import comparison
from ares_exp.records.statistics.comparison import MOST_FLIPS, Difference, Obstacle, find_remedy, sign_flip_p
from ares_exp.records.statistics.estimate import mean, wilson
from ares_exp.records.statistics.run_statistics import ks_up_to, pass_at_k, pass_hat_k, pass_rates

DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Crossed minus self-fertilised maize, in eighths of an inch: Fisher 1935, "The Design of Experiments", section 17."""
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
"""Extra hours of sleep of two drugs: Student 1908; R's `t.test(extra ~ group, data = sleep, paired = TRUE)`."""


def test_sign_flips_match_fishers_count_for_darwin() -> None:
    """Section 21: of 32,768 choices of signs 863 on either side are as extreme."""
    assert sign_flip_p(DARWIN) == 2 * 863 / 32768


def test_students_sleep_data_match_the_textbook_interval() -> None:
    found = Difference.of(SLEEP, is_bounded=False)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((1.58, 0.7001142, 2.4598858))
    assert (found.test, found.p) == ("sign-flip", 2 / 2**9)  # nine of ten are not zero, and all have one sign


def test_many_differences_match_scipys_t_test() -> None:
    rng = random.Random(3)
    differences = [rng.gauss(0.1, 0.4) for _ in range(MOST_FLIPS + 1)]
    expected = scipy.stats.ttest_1samp(differences, 0)
    interval = expected.confidence_interval(0.9)
    found = Difference.of(differences, is_bounded=True, level=0.9)
    assert found is not None
    assert found.test == "paired t"
    assert (found.p, found.low, found.high) == pytest.approx((expected.pvalue, interval.low, interval.high))


@pytest.mark.parametrize("seed", range(3))
def test_sign_flips_match_scipys_permutation_test(seed: int) -> None:
    rng = random.Random(seed)
    differences = [rng.randint(-4, 5) / 4 for _ in range(9)]
    expected = scipy.stats.permutation_test(
        (differences,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", n_resamples=math.inf
    )
    assert sign_flip_p(differences) == pytest.approx(expected.pvalue)


def test_sign_flips_tolerate_rounding() -> None:
    """0.1 + 0.2 is not 0.3, but no sum of signs is less far from zero for it."""
    assert sign_flip_p([0.1, 0.2, -0.3]) == 1.0
    assert sign_flip_p([1 / 3] * 6) == 2 / 64


def test_both_tests_agree_at_their_boundary() -> None:
    rng = random.Random(8)
    differences = [rng.gauss(0.2, 0.5) for _ in range(MOST_FLIPS)]
    assert sign_flip_p(differences) == pytest.approx(scipy.stats.ttest_1samp(differences, 0).pvalue, abs=0.02)


def test_zero_differences_do_not_prove_equality() -> None:
    """Bonett & Price 2012: with n = 20 and no discordant pair, `0 ± z sqrt(2 / 22 / 22)`."""
    found = Difference.of([0.0] * 20, is_bounded=True)
    assert found is not None
    half = scipy.stats.norm.ppf(0.975) * math.sqrt(2 / 22 / 22)
    assert (found.value, found.low, found.high, found.p) == (0.0, pytest.approx(-half), pytest.approx(half), 1.0)


def test_constant_difference_without_scale_has_no_interval() -> None:
    found = Difference.of([3.0] * 7, is_bounded=False)
    assert found is not None
    assert (found.value, found.low, found.high, found.p) == (3.0, None, None, 2 / 128)


@pytest.mark.parametrize("tasks", [MOST_FLIPS, MOST_FLIPS + 1])
def test_equal_differences_of_many_tasks_are_significant(tasks: int) -> None:
    found = Difference.of([0.25] * tasks, is_bounded=True)
    assert found is not None
    assert found.p == comparison.smallest_sign_flip_p(tasks)
    assert found.low is not None
    assert found.low > 0


def test_zero_or_one_task_proves_no_difference() -> None:
    assert Difference.of([], is_bounded=True) is None
    one = Difference.of([1.0], is_bounded=True)
    assert one is not None
    assert one.p == 1.0
    assert one.low is not None
    assert one.low < 0


def _worlds() -> Iterator[list[float]]:
    rng = random.Random(5)
    for _ in range(400):
        attempts, shift = rng.choice([1, 2, 4]), rng.choice([0.0, 0.3, 0.6])
        count = rng.randint(1, 24)
        yield [max(-1.0, min(1.0, shift + rng.randint(-attempts, attempts) / attempts)) for _ in range(count)]


def test_interval_and_p_value_are_consistent() -> None:
    for differences in _worlds():
        found = Difference.of(differences, is_bounded=True)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert -1.0 <= found.low <= found.value <= found.high <= 1.0
        assert (found.low <= 0 <= found.high) == (found.p >= 0.05), differences


Pairs = Sequence[tuple[Sequence[float], Sequence[float]]]


def _effect(size: float) -> Pairs:
    """Single attempts whose differences have mean `size` and standard deviation 1."""
    spread = math.sqrt(7 / 8)
    return [((0.0,), (size + sign * spread,)) for sign in (1, -1) * 4]


@pytest.mark.parametrize(("size", "tasks"), [(0.5, 34), (0.8, 15), (0.2, 199), (0.3, 90)])
def test_needed_tasks_match_published_sample_sizes(size: float, tasks: int) -> None:
    """G*Power: two-sided, alpha 0.05, power 0.8; the quantiles added up are off by one at most."""
    found = find_remedy(_effect(size), alpha=0.05)
    assert found.tasks is not None
    assert abs(found.tasks - tasks) <= 1
    assert _power(size, found.tasks) > 0.79
    assert _power(size, found.tasks - 1) < 0.81


def _power(size: float, tasks: int) -> float:
    """Exact, by the noncentral t distribution."""
    limit, shift = scipy.stats.t.ppf(0.975, tasks - 1), size * math.sqrt(tasks)
    return float(scipy.stats.nct.sf(limit, tasks - 1, shift) + scipy.stats.nct.cdf(-limit, tasks - 1, shift))


def _varied(passed: Sequence[tuple[int, int]], attempts: int) -> Pairs:
    def rewards(count: int) -> list[float]:
        return [1.0] * count + [0.0] * (attempts - count)

    return [(rewards(a), rewards(b)) for a, b in passed]


NOISY = [(1, 3), (2, 2), (2, 3), (3, 2), (1, 2), (2, 1), (2, 3), (3, 3), (2, 2), (1, 3)]


def test_advised_attempts_are_sufficient_and_minimal() -> None:
    pairs = _varied(NOISY, 4)
    found = find_remedy(pairs, alpha=0.05)
    assert found.attempts is not None
    assert found.attempts > 4
    within = mean([scipy.stats.tvar(a) + scipy.stats.tvar(b) for a, b in pairs])
    differences = [mean(b) - mean(a) for a, b in pairs]
    between = max(0.0, scipy.stats.tvar(differences) - within / 4)
    needed = sum(scipy.stats.t.ppf(q, 9) for q in (0.975, 0.8))

    def is_enough(attempts: int) -> bool:
        return abs(mean(differences)) >= needed * math.sqrt((between + within / attempts) / 10)

    assert is_enough(found.attempts)
    assert not is_enough(found.attempts - 1)


def test_varying_differences_need_more_tasks() -> None:
    pairs = _varied([(0, 16), (16, 0), (0, 16), (16, 0), (0, 16), (8, 8), (0, 16), (16, 0)], 16)
    found = find_remedy(pairs, alpha=0.05)
    assert (found.attempts, found.obstacle) == (None, Obstacle.TASKS_VARY)
    assert found.tasks is not None
    assert found.tasks > 8


def test_single_attempts_have_unknown_variance() -> None:
    pairs = _varied([(0, 1), (1, 0), (0, 1), (0, 1), (1, 1), (0, 0), (1, 1)], 1)
    found = find_remedy(pairs, alpha=0.05)
    assert (found.attempts, found.obstacle) == (None, Obstacle.SINGLE_ATTEMPTS)
    assert found.tasks is not None


@pytest.mark.parametrize(("tasks", "obstacle"), [(5, Obstacle.TOO_FEW_TASKS), (6, None)])
def test_five_tasks_cannot_reach_five_percent(tasks: int, obstacle: Obstacle | None) -> None:
    """Two of 2^5 choices of signs are more than that."""
    pairs = _varied([(0, 2), (1, 4), (0, 3), (1, 2), (2, 3), (1, 3)][:tasks], 4)
    found = find_remedy(pairs, alpha=0.05)
    assert found.obstacle is obstacle
    assert found.tasks is not None
    assert found.tasks >= 6


def test_absent_difference_has_no_advised_number() -> None:
    same = find_remedy(_varied([(2, 2)] * 7, 4), alpha=0.05)
    assert (same.attempts, same.tasks, same.obstacle, same.detectable) == (None, None, Obstacle.NO_DIFFERENCE, None)
    even = find_remedy(_varied([(1, 3), (3, 1)] * 4, 4), alpha=0.05)
    assert even.obstacle is Obstacle.NO_DIFFERENCE
    assert even.detectable == pytest.approx(
        sum(scipy.stats.t.ppf(q, 7) for q in (0.975, 0.8)) * math.sqrt(0.25 * 8 / 7 / 8)
    )


def test_one_task_settles_no_comparison() -> None:
    found = find_remedy(_varied([(1, 3)], 4), alpha=0.05)
    assert (found.attempts, found.tasks, found.obstacle) == (None, 6, Obstacle.TOO_FEW_TASKS)


def test_advice_exceeds_the_current_number() -> None:
    """Where the t-test would be significant and the exact one is not, what there is has not been enough."""
    rng, advised = random.Random(2), 0
    for _ in range(1500):
        attempts = rng.choice([2, 3, 4])
        odds = rng.random()
        passed = [
            (rng.randint(0, 1), sum(rng.random() < odds for _ in range(attempts))) for _ in range(rng.randint(4, 9))
        ]
        pairs = _varied(passed, attempts)
        p = sign_flip_p([mean(b) - mean(a) for a, b in pairs])
        if p < 0.05:
            continue
        found = find_remedy(pairs, alpha=0.05, p=p)
        advised += found.tasks is not None
        assert found.attempts is None or found.attempts > attempts, passed
        assert found.tasks is None or found.tasks > len(pairs), passed
    assert advised > 100


EVERY = [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]


def test_pass_rates_are_shares_of_all_choices() -> None:
    for n, c, k in EVERY:
        choices = list(combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))
        assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, choices)) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(200, 13, 10), (200, 199, 100), (100, 0, 5), (1000, 1, 1000)])
def test_pass_at_k_matches_its_paper(n: int, c: int, k: int) -> None:
    """Chen et al. 2021, figure 3."""
    expected = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("attempts", "ks"), [(0, ()), (1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (10, (1, 2, 4, 8, 10))]
)
def test_ks_double_up_to_the_number_of_attempts(attempts: int, ks: tuple[int, ...]) -> None:
    assert ks_up_to(attempts) == ks


def test_mean_covers_tasks_with_enough_attempts() -> None:
    once, four = pass_rates([(4, 4), (4, 1), (2, 1), (1, 0)], [1, 4])
    assert once.pass_at_k is not None
    assert four.pass_at_k is not None
    assert four.pass_hat_k is not None
    assert (once.pass_at_k.tasks, once.pass_at_k.attempts) == (4, 11)
    assert once.pass_at_k.value == pytest.approx((1 + 0.25 + 0.5 + 0) / 4)
    assert (four.pass_at_k.tasks, four.pass_at_k.attempts) == (2, 8)
    assert (four.pass_at_k.value, four.pass_hat_k.value) == (1.0, 0.5)


def test_rate_needs_tasks_with_enough_attempts() -> None:
    rate = pass_rates([(1, 1), (3, 0)], [4])[0]
    assert (rate.pass_at_k, rate.pass_hat_k) == (None, None)


def test_perfect_pass_rate_has_an_interval() -> None:
    rate = pass_rates([(4, 4)] * 6, [2])[0]
    assert rate.pass_hat_k is not None
    assert (rate.pass_hat_k.low, rate.pass_hat_k.high) == pytest.approx(wilson(1.0, 6))


def test_interval_of_one_task_follows_its_probability() -> None:
    low, high = wilson(0.5, 4)
    rate = pass_rates([(4, 2)], [2])[0]
    assert rate.pass_at_k is not None
    assert rate.pass_hat_k is not None
    assert (rate.pass_at_k.low, rate.pass_at_k.high) == pytest.approx((1 - (1 - low) ** 2, 1 - (1 - high) ** 2))
    assert (rate.pass_hat_k.low, rate.pass_hat_k.high) == pytest.approx((low**2, high**2))
    assert rate.pass_at_k.unit == "attempts"


def test_interval_contains_its_estimate() -> None:
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
