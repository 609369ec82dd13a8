"""Student's t: tail probabilities and quantiles, without a library that takes half a second to import."""

from __future__ import annotations

import functools
import math

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
