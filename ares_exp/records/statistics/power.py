"""The number of attempts, or tasks, that would settle whether two runs differ.

The differences of the tasks vary for two reasons: the tasks differ in what the change does to them (between), and each
mean is of few attempts (within). With T tasks and m attempts at each in either run their mean has the variance

    (between + within / m) / T        within: the mean over tasks of both runs' variances of single attempts
                                      between: what is left of the differences' variance, at least 0

(the components of variance of a nested design; Miller 2024, "Adding Error Bars to Evals", section 5, has the same). A
difference d is found with probability `power` by a two-sided test at `alpha` where

    d² >= (t(1 - alpha / 2) + t(power))² * variance        t with (T - 1) degrees of freedom

More attempts only shrink the second part: where the first alone is too much, more tasks are the only way.
The true difference is taken to be the observed one, which is a guess: so are the numbers.

Where that would have settled it already, and the exact test has not, the variance is the one that the p-value implies
(`paired.implied_error`): the numbers are always more than what there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import variance

from ares_exp.records.statistics.estimate import NEGLIGIBLE, mean, t_quantile
from ares_exp.records.statistics.paired import implied_error, smallest_sign_flip_p

POWER = 0.8
MOST = 1_000_000
"""Larger numbers of attempts or tasks are not given."""


class Obstacle(StrEnum):
    """The reason why more attempts at the same tasks would not settle it."""

    NO_DIFFERENCE = "no difference was observed"
    TOO_FEW_TASKS = "too few tasks for any p-value below alpha"
    TASKS_VARY = "the difference itself varies too much from task to task"
    SINGLE_ATTEMPTS = "the variation between attempts is unknown with one attempt per task"


@dataclass(frozen=True, slots=True)
class Remedy:
    """The attempts or tasks that would settle it, were the true difference the observed one.

    Attributes:
        attempts: At each of these tasks, in either run; `None`: no number would, see `obstacle`.
        tasks: Tasks like these, with as many attempts as now; `None`: unknown.
        obstacle: Why more attempts would not help, if so.
        detectable: The smallest difference that these tasks and attempts would find; `None`: unknown.
        power: Probability of finding the difference.
    """

    attempts: int | None
    tasks: int | None
    obstacle: Obstacle | None
    detectable: float | None
    power: float = POWER


def find_remedy(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, alpha: float, p: float | None = None
) -> Remedy:
    """Finds the number of attempts and of tasks that would settle whether B differs from A.

    Args:
        pairs: A's and B's rewards for each task that both have, at least one of either.
        alpha: The p-value from which on a difference is no chance.
        p: The p-value of these pairs, `alpha` or more; `None`: not tested.
    """
    number = len(pairs)
    differences = [mean(b) - mean(a) for a, b in pairs]
    found = abs(mean(differences))
    now = variance(differences) if number > 1 else 0.0
    if now <= NEGLIGIBLE:
        return Remedy(None, None, Obstacle.NO_DIFFERENCE if found <= NEGLIGIBLE else Obstacle.TOO_FEW_TASKS, None)
    detectable = _quantiles(number, alpha) * math.sqrt(now / number)
    if found <= NEGLIGIBLE:
        return Remedy(None, None, Obstacle.NO_DIFFERENCE, detectable)
    if p is not None and found >= _quantiles(number, alpha) * math.sqrt(now / number):
        now = max(now, number * implied_error(found, p, number) ** 2)
    attempts = _attempts(pairs, found, now, alpha)
    tasks = _tasks(found, now, alpha)
    if isinstance(attempts, Obstacle):
        return Remedy(None, tasks, attempts, detectable)
    return Remedy(attempts, tasks, None, detectable)


def is_too_few(tasks: int, alpha: float) -> bool:
    """Returns whether so few tasks have no p-value below `alpha`, whatever their rewards."""
    return smallest_sign_flip_p(tasks) >= alpha


def _attempts(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], found: float, now: float, alpha: float
) -> int | Obstacle:
    number = len(pairs)
    if is_too_few(number, alpha):
        return Obstacle.TOO_FEW_TASKS
    if any(len(rewards) < 2 for pair in pairs for rewards in pair):
        return Obstacle.SINGLE_ATTEMPTS
    within = mean([variance(a) + variance(b) for a, b in pairs])
    between = max(0.0, now - mean([variance(a) / len(a) + variance(b) / len(b) for a, b in pairs]))
    room = number * (found / _quantiles(number, alpha)) ** 2 - between
    if room <= 0 or within / room > MOST:
        return Obstacle.TASKS_VARY
    return max(2, math.ceil(within / room))


def _tasks(found: float, now: float, alpha: float) -> int | None:
    """Finds the smallest sufficient number of tasks; the quantiles depend on it, and only ever shrink."""
    low, high = 2, 2
    while not _enough(high, found, now, alpha):
        low, high = high + 1, 2 * high
        if high > MOST:
            return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _enough(middle, found, now, alpha) else (middle + 1, high)
    return high


def _enough(tasks: int, found: float, now: float, alpha: float) -> bool:
    return not is_too_few(tasks, alpha) and found >= _quantiles(tasks, alpha) * math.sqrt(now / tasks)


def _quantiles(tasks: int, alpha: float) -> float:
    return t_quantile(tasks - 1, 1 - alpha / 2) + t_quantile(tasks - 1, POWER)
