"""A mean with its interval, for tasks that are a sample of a larger set and were each run several times.

Attempts at one task resemble each other, so that they are no independent observations: the task is the unit.

*Scores between 0 and 1* (pass or fail, pass@k, most rewards) get Wilson's interval (Wilson 1927), which stays inside
the scale and never has width zero, with the effective number of observations in the place of their number, as for
clustered surveys (Korn & Graubard 1998; compared in Dean & Pagano 2015, Franco et al. 2019):

    n* = m (1 - m) / V * (z / t)²        m: mean; V: its cluster-robust variance; t with (tasks - 1) degrees of freedom

kept between two bounds. All attempts at a task being equal is the worst that can be: then n* is the number of tasks
(Kish's `N² / sum n²` where their attempts are not equally many). And pass or fail tells no more than independent
attempts would: n* is at most their number. Where all scores are 0, or all are 1, V says nothing: the worst is assumed.
So it is for pass@k and pass^k with k > 1 while either side has less than five tasks' worth: they are skewed near 0 and
1, and V then too small more often than not. One attempt a task is thus Wilson's interval itself.

*Other scales* get `m ± t sqrt(V)`; and no interval where V is zero, for then nothing tells how wide it is.

V is the ratio estimator's, `T / (T - 1) * sum (S_i - n_i m)² / N²` with T tasks, S_i the sum of the i-th one's n_i
scores and N scores in all (Cochran 1977; Miller 2024, "Adding Error Bars to Evals", without the small-sample factor).

Of a single task nothing tells how others would go: its attempts are the units then, and the interval is about it.
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
    """Computes the probability that a variable with `freedom` degrees of freedom is further from 0 than `value`."""
    square = value * value
    if math.isinf(square):
        return 0.0
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square), square / (freedom + square))


@functools.lru_cache(maxsize=1024)
def t_quantile(freedom: int, probability: float) -> float:
    """Computes a quantile, by halving an interval until it is as small as floats can be."""
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
    """Computes the regularised incomplete beta function; `rest` is 1 - x, without its rounding."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    if x < (a + 1) / (a + b + 2):
        return math.exp(scale) * _fraction(a, b, x) / a
    return 1 - math.exp(scale) * _fraction(b, a, rest) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Computes the continued fraction of the incomplete beta function, by Lentz's method."""
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


LEVEL = 0.95
NEGLIGIBLE = 1e-9
"""What of a score is rounding."""
FEW = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and where it may lie.

    Attributes:
        value: The mean.
        low, high: The interval; `None` where the data cannot tell one.
        tasks: Tasks that it is about.
        attempts: Attempts at them.
        unit: What the interval takes for a sample: `"tasks"`, or, where there is one task, its `"attempts"`.
    """

    value: float
    low: float | None
    high: float | None
    tasks: int
    attempts: int
    unit: str = "tasks"


def mean_over_attempts(tasks: Iterable[Sequence[float]], *, level: float = LEVEL) -> Estimate | None:
    """Estimates the mean of all scores, given by task.

    Args:
        tasks: The scores of each task's attempts; a task without any does not count.
        level: How often the interval is to hold the true mean.

    Returns:
        `None` when there are no scores.
    """
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
    """Estimates the mean of one number between 0 and 1 for each of several tasks.

    Args:
        values: One for each of two tasks or more.
        attempts: How many yes or no they were found by, in all.
        is_skewed: Whether few tasks on either side make their spread unreliable.
        level: How often the interval is to hold the true mean.
    """
    few = is_skewed and min(mean(values), 1 - mean(values)) * len(values) < FEW
    most = len(values) if few else attempts
    value, low, high = _interval([[one] for one in values], most=most, level=level)
    return Estimate(value, low, high, len(values), attempts)


def z_quantile(probability: float) -> float:
    """Computes a quantile of the normal distribution."""
    return NormalDist().inv_cdf(probability)


def mean(values: Sequence[float]) -> float:
    """Computes the mean, whatever the order and size of the numbers."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def _interval(
    clusters: Sequence[Sequence[float]], *, most: int | None, level: float
) -> tuple[float, float | None, float | None]:
    """Makes mean and interval; `most` bounds the number of observations that the interval is based on."""
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
    """Computes the cluster-robust variance of the mean; `None` for one cluster, or numbers too large to square."""
    number, total = len(clusters), sum(map(len, clusters))
    if number == 1:
        return None
    deviations = [math.fsum(score / total - center / total for score in cluster) for cluster in clusters]
    variance = number / (number - 1) * sum(deviation * deviation for deviation in deviations)
    return variance if math.isfinite(variance) else None


def _observations(
    center: float, variance: float | None, clusters: int, least: float, most: int | None, upper: float
) -> float:
    """Computes the effective number of observations, n* above."""
    spread = center * (1 - center)
    if most is not None and least >= most:
        return least
    if variance is None or spread <= NEGLIGIBLE:
        return least
    if variance <= NEGLIGIBLE**2:
        return least if most is None else most
    found = spread / variance * (z_quantile(upper) / t_quantile(clusters - 1, upper)) ** 2
    return max(least, found if most is None else min(found, most))


def wilson(share: float, observations: float, *, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a share that so many observations, not necessarily a whole number, have shown."""
    z = z_quantile(1 - (1 - level) / 2)
    weight = z * z / observations
    center = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / observations + weight / (4 * observations))
    return max(0.0, min(center - half, share)), min(1.0, max(center + half, share))
