"""The comparison of two runs on their common tasks: difference, p-value, and number of attempts needed.

The test is paired: it compares the results of each common task in both runs. The differences between the runs do not
depend on how hard the tasks are. They are therefore more informative than the two means (Miller 2024, "Adding Error
Bars to Evals", section 4). Each task has one difference, for any number of attempts.

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

The number of attempts or tasks that would be needed to show a difference depends on its variance. The differences of
the tasks vary for two reasons. The change affects tasks differently (between), and each task's mean is computed from
few attempts (within). With T tasks and m attempts per task and run, the variance of the mean is

    (between + within / m) / T        within: mean over tasks of the sum of both runs' variances of single attempts
                                      between: remaining variance of the differences, at least 0

(the components of variance of a nested design; see also Miller 2024, "Adding Error Bars to Evals", section 5). A
two-sided test at `alpha` finds a difference d with probability `power` if

    d² >= (t(1 - alpha / 2) + t(power))² * variance        t with (T - 1) degrees of freedom

More attempts only reduce the variance within tasks. If the variance between tasks is too large, only more tasks help.
The true difference is assumed to equal the observed difference, so the resulting numbers are estimates.

A difference may be significant with this variance, but not in the exact test. Then the larger variance that the p-value
implies is used (`implied_error`). Otherwise, the result could be fewer attempts than there already are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import stdev, variance
from typing import Any, Self

from ares_exp.records.statistics.estimate import LEVEL, NEGLIGIBLE, mean, t_quantile, two_sided_p, z_quantile
from ares_exp.records.statistics.run_statistics import RunStatistics, TaskStatistics, json_ready

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


ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class TaskPair:
    """The statistics of one task in run A (`a`) and in run B (`b`)."""

    a: TaskStatistics
    b: TaskStatistics

    @property
    def difference(self) -> float:
        """The share of attempts that passed in B minus the share in A. Attempts without a reward count as failed."""
        return self.b.passed / self.b.attempts - self.a.passed / self.a.attempts


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of run B with run A, which is the baseline.

    Attributes:
        alpha: P-value below which a difference is significant.
        pairs: Statistics of the tasks that are in both runs.
        only_a, only_b: Names of tasks that are only in one of the runs. These tasks are not compared.
        errors_as_zero: Difference of the mean rewards if attempts without a reward count as 0; `None` without common
            tasks.
        scored_only: Difference of the mean rewards over only the attempts that have a reward; `None` without common
            tasks.
        remedy: Number of attempts or tasks that would make `errors_as_zero` significant; `None` without common tasks.
    """

    alpha: float
    pairs: tuple[TaskPair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    errors_as_zero: Difference | None
    scored_only: Difference | None
    remedy: Remedy | None

    @classmethod
    def of(cls, a: RunStatistics, b: RunStatistics, *, alpha: float = ALPHA, comparisons: int = 1) -> Self:
        """Compares the statistics of run A (the baseline) and run B, which must use the same threshold.

        If this is one of several comparisons, pass their number as `comparisons`. `remedy` is then computed with
        `alpha` divided by this number. The p-values are not adjusted.
        """
        of_a, of_b = ({task.task_name: task for task in run.tasks} for run in (a, b))
        pairs = tuple(TaskPair(task, of_b[name]) for name, task in of_a.items() if name in of_b)
        rewards = [(pair.a.rewards_with_zeros, pair.b.rewards_with_zeros) for pair in pairs]
        errors_as_zero = _difference(pairs, lambda task: task.rewards_with_zeros, alpha)
        p = errors_as_zero.p if errors_as_zero is not None else None
        return cls(
            alpha=alpha,
            pairs=pairs,
            only_a=tuple(name for name in of_a if name not in of_b),
            only_b=tuple(name for name in of_b if name not in of_a),
            errors_as_zero=errors_as_zero,
            scored_only=_difference(pairs, lambda task: task.scored_rewards, alpha),
            remedy=find_remedy(rewards, alpha=alpha / comparisons, p=p) if rewards else None,
        )

    @property
    def is_too_few(self) -> bool:
        """Whether there are so few common tasks that even the largest difference could not be significant."""
        return bool(self.pairs) and is_too_few(len(self.pairs), self.alpha)

    @property
    def flips(self) -> tuple[TaskPair, ...]:
        """The tasks whose share of passed attempts differs between the runs, starting with the largest difference."""
        changed = [pair for pair in self.pairs if pair.difference]
        return tuple(sorted(changed, key=lambda pair: (-abs(pair.difference), pair.a.task_name)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form, which has `flips` instead of `pairs`. NaN and infinity become `None`."""
        data = {key: value for key, value in asdict(self).items() if key != "pairs"}
        flips = [{"task_name": one.a.task_name, **_counts("a", one.a), **_counts("b", one.b)} for one in self.flips]
        return dict(json_ready({**data, "flips": flips}))


def _counts(name: str, task: TaskStatistics) -> dict[str, Any]:
    return {f"{name}_passed": task.passed, f"{name}_scored": task.scored, f"{name}_attempts": task.attempts}


def _difference(
    pairs: tuple[TaskPair, ...], rewards_of: Callable[[TaskStatistics], tuple[float, ...]], alpha: float
) -> Difference | None:
    rewards = [(rewards_of(pair.a), rewards_of(pair.b)) for pair in pairs]
    both = [(a, b) for a, b in rewards if a and b]
    is_bounded = all(0.0 <= reward <= 1.0 for pair in both for own in pair for reward in own)
    return Difference.of([sum(b) / len(b) - sum(a) / len(a) for a, b in both], is_bounded=is_bounded, level=1 - alpha)
