"""The mean of scores with a confidence interval, for a sample of tasks with several attempts each.

Attempts at the same task are similar, so they are not independent observations. The tasks are the independent units.

*Scores between 0 and 1* (pass or fail, pass@k, most rewards) get Wilson's interval (Wilson 1927), which stays inside
the scale and never has width zero. It needs a number of independent observations. As for clustered surveys, this is the
effective number n* (Korn & Graubard 1998; compared in Dean & Pagano 2015, Franco et al. 2019):

    n* = m (1 - m) / V * (z / t)²        m: mean; V: its cluster-robust variance; t with (tasks - 1) degrees of freedom

n* has two bounds. In the worst case, all attempts at a task have the same score. The lower bound is therefore the
number of tasks (Kish's `N² / sum n²` if the tasks have different numbers of attempts). For pass or fail, the upper
bound is the number of attempts, because attempts are at best independent. If all scores are 0, or all are 1, V contains
no information and the lower bound is used. The lower bound is also used for pass@k and pass^k with k > 1 if fewer than
five tasks succeed or fewer than five tasks fail. These rates are skewed near 0 and 1, where V is usually too small.
With one attempt per task, the result is the plain Wilson interval.

*Scores on other scales* get the interval `m ± t sqrt(V)`. If V is zero, they get no interval.

V is the variance of the ratio estimator, `T / (T - 1) * sum (S_i - n_i m)² / N²`, with T tasks, N scores in total, and
S_i the sum of the n_i scores of task i (Cochran 1977; Miller 2024, "Adding Error Bars to Evals", without the
small-sample factor).

A single task contains no information about other tasks. Its attempts are then the units, and the interval describes
only this task.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

_TINY = 1e-300
_PRECISION = 1e-16


def two_sided_p(freedom: int, value: float) -> float:
    """Computes the two-sided p-value of the t statistic `value` with `freedom` degrees of freedom."""
    square = value * value
    if math.isinf(square):
        return 0.0
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square), square / (freedom + square))


@functools.lru_cache(maxsize=1024)
def t_quantile(freedom: int, probability: float) -> float:
    """Computes the value below which Student's t-distribution has this `probability`, to the precision of floats."""
    if probability < 0.5:
        return -t_quantile(freedom, 1 - probability)
    if probability >= 1:
        return math.inf
    outside, low, high = 2 * (1 - probability), 0.0, 1.0
    while two_sided_p(freedom, high) > outside:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if two_sided_p(freedom, middle) > outside else (low, middle)
    return high if outside < 1 else 0.0


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """Computes the regularised incomplete beta function. `rest` is 1 - x, computed without a rounding error."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    if x < (a + 1) / (a + b + 2):
        return math.exp(scale) * _fraction(a, b, x) / a
    return 1 - math.exp(scale) * _fraction(b, a, rest) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Computes the continued fraction of the incomplete beta function with Lentz's method."""
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value, m, change = d, 0, 0.0
    while abs(change - 1) > 4 * _PRECISION and m < 100_000:
        m += 1
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _nonzero(1 + term * d)
            c = _nonzero(1 + term / c)
            change = c * d
            value *= change
    return value


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


z_quantile = NormalDist().inv_cdf
"""Function that computes the value below which the standard normal distribution has a given probability."""
LEVEL = 0.95
NEGLIGIBLE = 1e-9
"""Differences between scores that are smaller than this value are treated as rounding errors."""
FEW = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its confidence interval.

    Attributes:
        value: The mean.
        low, high: Bounds of the interval; `None` if no interval can be computed.
        tasks: Number of tasks.
        attempts: Number of attempts at these tasks.
        unit: Independent units of the sample: `"tasks"`, or `"attempts"` if there is only one task.
    """

    value: float
    low: float | None
    high: float | None
    tasks: int
    attempts: int
    unit: str = "tasks"


def mean_over_attempts(tasks: Iterable[Sequence[float]], *, level: float = LEVEL) -> Estimate | None:
    """Estimates the mean of all scores; `None` without scores. `tasks` contains a sequence of scores for each task."""
    scored = [scores for scores in tasks if scores]
    if not scored:
        return None
    attempts = sum(map(len, scored))
    clusters = scored if len(scored) > 1 else [[score] for score in scored[0]]
    is_yes_or_no = all(score in (0.0, 1.0) for scores in scored for score in scores)
    value, low, high = _interval(clusters, most=attempts if is_yes_or_no else None, level=level)
    return Estimate(value, low, high, len(scored), attempts, "tasks" if len(scored) > 1 else "attempts")


def mean_over_tasks(
    values: Sequence[float], *, attempts: int, is_skewed: bool = False, level: float = LEVEL
) -> Estimate:
    """Estimates the mean of `values` between 0 and 1, one for each task. There must be at least two tasks.

    `attempts` is the total number of attempts. Set `is_skewed` if the variance of the values is unreliable when their
    mean is near 0 or 1. The effective number of observations is then at most the number of tasks.
    """
    few = is_skewed and min(mean(values), 1 - mean(values)) * len(values) < FEW
    most = len(values) if few else attempts
    value, low, high = _interval([[one] for one in values], most=most, level=level)
    return Estimate(value, low, high, len(values), attempts)


def mean(values: Sequence[float]) -> float:
    """Computes the mean exactly: without overflow, and with the same result for any order of the values."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def _interval(
    clusters: Sequence[Sequence[float]], *, most: int | None, level: float
) -> tuple[float, float | None, float | None]:
    """Computes the mean of the scores, which are grouped by task, and the bounds of its interval.

    `most` is the upper bound on the effective number of observations (see the docstring of the module).
    """
    scores = [score for cluster in clusters for score in cluster]
    center, upper = mean(scores), 1 - (1 - level) / 2
    variance = _variance(clusters, center)
    if all(0.0 <= score <= 1.0 for score in scores):
        least = len(scores) ** 2 / math.fsum(len(cluster) ** 2 for cluster in clusters)
        return center, *wilson(center, _observations(center, variance, len(clusters), least, most, upper), level=level)
    if variance is None or variance <= (NEGLIGIBLE * center) ** 2:
        return center, None, None
    half = t_quantile(len(clusters) - 1, upper) * math.sqrt(variance)
    return (center, center - half, center + half) if math.isfinite(half) else (center, None, None)


def _variance(clusters: Sequence[Sequence[float]], center: float) -> float | None:
    """Computes the cluster-robust variance of the mean (V in the docstring of the module).

    Returns `None` if there is only one cluster, or if the variance overflows.
    """
    number, total = len(clusters), sum(map(len, clusters))
    if number == 1:
        return None
    deviations = [math.fsum(score / total - center / total for score in cluster) for cluster in clusters]
    variance = number / (number - 1) * sum(deviation * deviation for deviation in deviations)
    return variance if math.isfinite(variance) else None


def _observations(
    center: float, variance: float | None, clusters: int, least: float, most: int | None, upper: float
) -> float:
    """Computes the effective number of observations (n* in the docstring of the module)."""
    spread = center * (1 - center)
    if variance is None or spread <= NEGLIGIBLE or (most is not None and least >= most):
        return least
    if variance <= NEGLIGIBLE**2:
        return least if most is None else most
    found = spread / variance * (z_quantile(upper) / t_quantile(clusters - 1, upper)) ** 2
    return max(least, found if most is None else min(found, most))


def wilson(share: float, observations: float, *, level: float = LEVEL) -> tuple[float, float]:
    """Computes Wilson's score interval of a share. The number of observations does not have to be an integer."""
    z = z_quantile(1 - (1 - level) / 2)
    weight = z * z / observations
    center = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / observations + weight / (4 * observations))
    return max(0.0, min(center - half, share)), min(1.0, max(center + half, share))
