"""The paired test of two runs, which compares the results of each common task in both runs.

The differences between the runs do not depend on how hard the tasks are. They are therefore more informative than the
two means (Miller 2024, "Adding Error Bars to Evals", section 4). Each task has one difference, for any number of
attempts.

If few tasks differ, the p-value is exact. If the runs were equal, each difference could equally likely have the
opposite sign. The p-value is the share of all combinations of signs for which the mean is at least as far from zero as
the observed mean (Fisher's test of paired differences). If many tasks differ, the t-test is used, which then agrees
with the exact test.

The interval is from the paired t-test. If all differences are equal, their spread is zero. If the rewards are also
between 0 and 1, the interval is from Bonett & Price (2012, for paired proportions), who add one task in favour of each
run. If an interval contradicts the exact test, it is replaced by the test-based interval (Miettinen 1976). This is the
t interval with the standard error that the p-value implies:

    |d| / t(1 - p / 2)        d: the mean of the differences; t with (tasks - 1) degrees of freedom

The interval therefore never contradicts the p-value. For rewards between 0 and 1, it is clipped to [-1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from ares_exp.records.statistics.estimate import LEVEL, NEGLIGIBLE, mean, t_quantile, two_sided_p, z_quantile

MOST_FLIPS = 18
"""Maximum number of tasks with a difference for the exact test. 18 such tasks have `2 ** 18` sign combinations."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean reward of run B minus the mean reward of run A, with its interval and test.

    Attributes:
        value: Mean of the tasks' differences.
        low, high: Bounds of the interval; `None` if no interval can be computed.
        p: Two-sided p-value: the probability of a difference of at least this size if the runs were equal.
        test: Test that computed the p-value: `"sign-flip"` or `"paired t"`.
        tasks: Number of common tasks.
        interval: Source of the interval: `"spread"` (the spread of the differences) or `"test"` (the p-value); `None`
            without an interval.
    """

    value: float
    low: float | None
    high: float | None
    p: float
    test: str
    tasks: int
    interval: str | None = None

    @classmethod
    def of(cls, differences: Sequence[float], *, is_bounded: bool, level: float = LEVEL) -> Difference | None:
        """Tests the `differences`, one per task: B's mean reward minus A's. Returns `None` if there are no tasks.

        Set `is_bounded` if all rewards are between 0 and 1, so that each difference is between -1 and 1.
        """
        if not differences:
            return None
        value, error, number = mean(differences), standard_error(differences), len(differences)
        if sum(abs(one) > NEGLIGIBLE for one in differences) <= MOST_FLIPS:
            p, test = sign_flip_p(differences), "sign-flip"
        else:
            p = two_sided_p(number - 1, value / error) if error else smallest_sign_flip_p(number)
            test = "paired t"
        interval, made_of = _interval(differences, value, error, is_bounded, level), "spread"
        if interval is None:
            return cls(value, None, None, p, test, number)
        low, high = interval
        if number > 1 and (p < 1 - level) == (low <= 0 <= high):
            half = t_quantile(number - 1, 1 - (1 - level) / 2) * implied_error(value, p, number)
            low, high, made_of = value - half, value + half, "test"
        if is_bounded:
            low, high = max(-1.0, low), min(1.0, high)
        return cls(value, low, high, p, test, number, made_of)


def standard_error(differences: Sequence[float]) -> float:
    """Computes the standard error of the mean difference; 0.0 if all values are equal or there is only one value."""
    if len(differences) < 2:
        return 0.0
    error = stdev(differences) / math.sqrt(len(differences))
    return error if error > NEGLIGIBLE * max(abs(mean(differences)), NEGLIGIBLE) else 0.0


def implied_error(value: float, p: float, tasks: int) -> float:
    """Computes the standard error with which a t-test of `value` has the p-value `p`; infinite for `p` = 1."""
    quantile = t_quantile(tasks - 1, 1 - p / 2)
    return abs(value) / quantile if quantile > 0 else math.inf


def sign_flip_p(differences: Sequence[float]) -> float:
    """Computes the p-value of the exact test.

    This is the share of all combinations of signs for which the mean is at least as far from zero as the observed mean.
    Memory and time are proportional to `2 ** n`, with n nonzero differences.
    """
    import numpy as np

    nonzero = [one for one in differences if abs(one) > NEGLIGIBLE]
    sums = np.zeros(1)
    for one in nonzero:
        sums = np.concatenate((sums + one, sums - one))
    return float(np.mean(np.abs(sums) >= abs(math.fsum(nonzero)) - NEGLIGIBLE * math.fsum(map(abs, nonzero))))


def smallest_sign_flip_p(tasks: int) -> float:
    """Computes the smallest p-value that the exact test can have with this number of tasks."""
    return min(1.0, 2.0 ** (1 - tasks))


def _interval(
    differences: Sequence[float], value: float, error: float, is_bounded: bool, level: float
) -> tuple[float, float] | None:
    number, upper = len(differences), 1 - (1 - level) / 2
    if error:
        half = t_quantile(number - 1, upper) * error
        return value - half, value + half
    if not is_bounded:
        return None
    padded = [*differences, 1.0, -1.0]
    center = mean(padded)
    half = z_quantile(upper) * math.sqrt(mean([(one - center) ** 2 for one in padded]) / len(padded))
    return center - half, center + half
