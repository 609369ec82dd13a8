"""The paired test of two runs on the tasks that both run: each task is compared with itself.

What all tasks have in common (some are hard, some easy) drops out of the differences, so that they tell more than the
two means do (Miller 2024, "Adding Error Bars to Evals", section 4). One difference a task, whatever its attempts.

The p-value is exact where few tasks differ: were the runs alike, each difference could as well have had the other sign,
so it is the share of all choices of signs whose mean is as far from zero (Fisher's test of paired differences). Where
many do, it is the t-test's, which then says the same.

The interval is the paired t-test's. Differences that are all the same have no spread to tell it from; with rewards
between 0 and 1 it is then Bonett & Price's (2012, for paired proportions): as if one more task spoke for each side.
Such an interval may leave 0 out where the exact test finds nothing, or hold it where that finds something. It is then
the test's own (Miettinen 1976): the t interval with the standard error that the p-value implies,

    |d| / t(1 - p / 2)        d: the mean of the differences; t with (tasks - 1) degrees of freedom

so that interval and p-value never contradict each other. With rewards between 0 and 1 it is kept within -1 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ares_exp.records.statistics.estimate import LEVEL, NEGLIGIBLE, mean, t_quantile, two_sided_p, z_quantile

MOST_FLIPS = 18
"""With more tasks that differ the t-test decides: there are `2 ** 18` choices of signs already."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of B minus that of A.

    Attributes:
        value: The mean of the differences of the tasks.
        low, high: The interval; `None` where the data cannot tell one.
        p: Two-sided p-value: how often chance alone would make a difference as large.
        test: `"sign-flip"` or `"paired t"`.
        tasks: How many tasks both have.
        interval: What the interval is made of: `"spread"`, of the differences; `"test"`, the p-value; `None`: there is
            none.
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
        """Tests one difference per task.

        Args:
            differences: B's mean minus A's.
            is_bounded: Whether all rewards are between 0 and 1.
            level: How often the interval is to hold the true difference.

        Returns:
            `None` when there are no tasks.
        """
        if not differences:
            return None
        value, error, number = mean(differences), standard_error(differences), len(differences)
        if sum(abs(one) > NEGLIGIBLE for one in differences) <= MOST_FLIPS:
            p, test = sign_flip_p(differences), "sign-flip"
        else:
            p, test = _t_p(value, error, number), "paired t"
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
    """Computes the standard error of the mean; 0.0 when the numbers are all the same, or one."""
    number, center = len(differences), mean(differences)
    if number < 2:
        return 0.0
    squares = math.fsum((one - center) * (one - center) for one in differences)
    error = math.sqrt(squares / (number - 1) / number)
    return error if error > NEGLIGIBLE * max(abs(center), NEGLIGIBLE) else 0.0


def implied_error(value: float, p: float, tasks: int) -> float:
    """Computes the standard error that makes `p` the p-value of a t-test of this mean; infinite for a p of 1."""
    quantile = t_quantile(tasks - 1, 1 - p / 2)
    return abs(value) / quantile if quantile > 0 else math.inf


def sign_flip_p(differences: Sequence[float]) -> float:
    """Computes the share of all choices of signs with a mean at least as far from zero.

    Memory and time grow as `2 ** n` with the n differences that are not zero.
    """
    import numpy as np

    nonzero = [one for one in differences if abs(one) > NEGLIGIBLE]
    sums = np.zeros(1)
    for one in nonzero:
        sums = np.concatenate((sums + one, sums - one))
    return float(np.mean(np.abs(sums) >= abs(math.fsum(nonzero)) - NEGLIGIBLE * math.fsum(map(abs, nonzero))))


def smallest_sign_flip_p(tasks: int) -> float:
    """Computes the lower bound of `sign_flip_p` for so many tasks."""
    return min(1.0, 2.0 ** (1 - tasks))


def _t_p(value: float, error: float, number: int) -> float:
    return two_sided_p(number - 1, value / error) if error else smallest_sign_flip_p(number)


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
