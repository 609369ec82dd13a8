"""The difference of two runs: against published worked examples, and scipy."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import scipy

from ares_exp.records.statistics.paired import MOST_FLIPS, Difference, sign_flip_p, smallest_sign_flip_p

DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Crossed minus self-fertilised maize, in eighths of an inch: Fisher 1935, "The Design of Experiments", section 17."""
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
"""Extra hours of sleep of two drugs: Student 1908; R's `t.test(extra ~ group, data = sleep, paired = TRUE)`."""


def test_sign_flips_of_darwins_maize_are_fishers_count() -> None:
    """Section 21: of 32,768 choices of signs 863 on either side are as extreme."""
    assert sign_flip_p(DARWIN) == 2 * 863 / 32768


def test_students_sleep_has_the_interval_of_the_textbooks() -> None:
    found = Difference.of(SLEEP, is_bounded=False)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((1.58, 0.7001142, 2.4598858))
    assert (found.test, found.p) == ("sign-flip", 2 / 2**9)  # nine of ten are not zero, and all have one sign


def test_the_t_test_where_many_tasks_differ_is_scipys() -> None:
    rng = random.Random(3)
    differences = [rng.gauss(0.1, 0.4) for _ in range(MOST_FLIPS + 1)]
    expected = scipy.stats.ttest_1samp(differences, 0)
    interval = expected.confidence_interval(0.9)
    found = Difference.of(differences, is_bounded=True, level=0.9)
    assert found is not None
    assert found.test == "paired t"
    assert (found.p, found.low, found.high) == pytest.approx((expected.pvalue, interval.low, interval.high))


@pytest.mark.parametrize("seed", range(3))
def test_sign_flips_are_scipys_permutation_test(seed: int) -> None:
    rng = random.Random(seed)
    differences = [rng.randint(-4, 5) / 4 for _ in range(9)]
    expected = scipy.stats.permutation_test(
        (differences,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", n_resamples=math.inf
    )
    assert sign_flip_p(differences) == pytest.approx(expected.pvalue)


def test_fractions_that_should_be_equal_are() -> None:
    """0.1 + 0.2 is not 0.3, but no sum of signs is less far from zero for it."""
    assert sign_flip_p([0.1, 0.2, -0.3]) == 1.0
    assert sign_flip_p([1 / 3] * 6) == 2 / 64


def test_both_tests_agree_where_one_follows_the_other() -> None:
    rng = random.Random(8)
    differences = [rng.gauss(0.2, 0.5) for _ in range(MOST_FLIPS)]
    assert sign_flip_p(differences) == pytest.approx(scipy.stats.ttest_1samp(differences, 0).pvalue, abs=0.02)


def test_all_zero_is_no_proof_of_sameness() -> None:
    """Bonett & Price 2012: with n = 20 and no discordant pair, `0 ± z sqrt(2 / 22 / 22)`."""
    found = Difference.of([0.0] * 20, is_bounded=True)
    assert found is not None
    half = scipy.stats.norm.ppf(0.975) * math.sqrt(2 / 22 / 22)
    assert (found.value, found.low, found.high, found.p) == (0.0, pytest.approx(-half), pytest.approx(half), 1.0)


def test_an_unknown_scale_has_no_interval_where_nothing_varies() -> None:
    found = Difference.of([3.0] * 7, is_bounded=False)
    assert found is not None
    assert (found.value, found.low, found.high, found.p) == (3.0, None, None, 2 / 128)


@pytest.mark.parametrize("tasks", [MOST_FLIPS, MOST_FLIPS + 1])
def test_many_tasks_that_differ_alike_are_no_chance(tasks: int) -> None:
    found = Difference.of([0.25] * tasks, is_bounded=True)
    assert found is not None
    assert found.p == smallest_sign_flip_p(tasks)
    assert found.low is not None
    assert found.low > 0


def test_no_task_is_no_difference_and_one_proves_nothing() -> None:
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


def test_interval_and_p_value_never_contradict_each_other() -> None:
    for differences in _worlds():
        found = Difference.of(differences, is_bounded=True)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert -1.0 <= found.low <= found.value <= found.high <= 1.0
        assert (found.low <= 0 <= found.high) == (found.p >= 0.05), differences
