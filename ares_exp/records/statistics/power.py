"""The number of attempts or tasks that would be needed to show that two runs differ.

The differences of the tasks vary for two reasons. The change affects tasks differently (between), and each task's mean
is computed from few attempts (within). With T tasks and m attempts per task and run, the variance of the mean is

    (between + within / m) / T        within: mean over tasks of the sum of both runs' variances of single attempts
                                      between: remaining variance of the differences, at least 0

(the components of variance of a nested design; see also Miller 2024, "Adding Error Bars to Evals", section 5). A
two-sided test at `alpha` finds a difference d with probability `power` if

    d² >= (t(1 - alpha / 2) + t(power))² * variance        t with (T - 1) degrees of freedom

More attempts only reduce the variance within tasks. If the variance between tasks is too large, only more tasks help.
The true difference is assumed to equal the observed difference, so the resulting numbers are estimates.

A difference may be significant with this variance, but not in the exact test. Then the larger variance that the p-value
implies is used (`paired.implied_error`). Otherwise, the result could be fewer attempts than there already are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import variance

from ares_exp.records.statistics.estimate import NEGLIGIBLE, mean, t_quantile
from ares_exp.records.statistics.paired import implied_error, smallest_sign_flip_p

POWER = 0.8
MOST = 1_000_000
"""Largest number of attempts or tasks that is reported. If more would be needed, no number is reported."""


class Obstacle(StrEnum):
    """The reason why more attempts at the same tasks would not make the difference significant."""

    NO_DIFFERENCE = "no difference was observed"
    TOO_FEW_TASKS = "too few tasks for any p-value below alpha"
    TASKS_VARY = "the difference itself varies too much from task to task"
    SINGLE_ATTEMPTS = "the variation between attempts is unknown with one attempt per task"


@dataclass(frozen=True, slots=True)
class Remedy:
    """The number of attempts or tasks that would make the difference of two runs significant.

    The numbers assume that the true difference equals the observed difference.

    Attributes:
        attempts: Required attempts per task and run; `None` if no number of attempts is sufficient (see `obstacle`).
        tasks: Required number of similar tasks, with the current number of attempts; `None` if unknown.
        obstacle: Reason why more attempts would not help; `None` if more attempts would help.
        detectable: Smallest difference that the current tasks and attempts would show with probability `power`; `None`
            if unknown.
        power: Probability with which the test finds the difference.
    """

    attempts: int | None
    tasks: int | None
    obstacle: Obstacle | None
    detectable: float | None
    power: float = POWER


def find_remedy(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, alpha: float, p: float | None = None
) -> Remedy:
    """Computes how many attempts or tasks would be needed to show that run B differs from run A.

    Args:
        pairs: For each common task, the rewards in A and the rewards in B. Both have at least one reward.
        alpha: P-value below which a difference is significant.
        p: P-value of the observed difference, at least `alpha`; `None` if it was not tested.
    """
    number = len(pairs)
    differences = [mean(b) - mean(a) for a, b in pairs]
    found = abs(mean(differences))
    now = variance(differences) if number > 1 else 0.0
    detectable = _quantiles(number, alpha) * math.sqrt(now / number) if now > NEGLIGIBLE else None
    if found <= NEGLIGIBLE:
        return Remedy(None, None, Obstacle.NO_DIFFERENCE, detectable)
    if detectable is None:
        return Remedy(None, _tasks(found, now, alpha), Obstacle.TOO_FEW_TASKS, None)
    if p is not None and found >= detectable:
        now = max(now, number * implied_error(found, p, number) ** 2)
    attempts = _attempts(pairs, found, now, alpha)
    tasks = _tasks(found, now, alpha)
    if isinstance(attempts, Obstacle):
        return Remedy(None, tasks, attempts, detectable)
    return Remedy(attempts, tasks, None, detectable)


def is_too_few(tasks: int, alpha: float) -> bool:
    """Returns whether this number of tasks is too small for a p-value below `alpha`, whatever the rewards are."""
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
    """Finds the smallest number of tasks that shows the difference, by bisection; `None` if it exceeds `MOST`."""

    def are_enough(tasks: int) -> bool:
        return not is_too_few(tasks, alpha) and found >= _quantiles(tasks, alpha) * math.sqrt(now / tasks)

    numbers = range(2, MOST + 1)
    index = bisect_left(numbers, True, key=are_enough)
    return numbers[index] if index < len(numbers) else None


def _quantiles(tasks: int, alpha: float) -> float:
    return t_quantile(tasks - 1, 1 - alpha / 2) + t_quantile(tasks - 1, POWER)
