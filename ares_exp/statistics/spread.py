"""How a number is spread over attempts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Self

from ares_exp.statistics.estimate import mean


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one number for each attempt.

    Attributes:
        count: How many attempts have it.
        mean: The mean.
        median: The median.
        p95: The 95th percentile, interpolated between the two numbers next to it.
        total: The sum.
    """

    count: int
    mean: float
    median: float
    p95: float
    total: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """From the numbers; all zero of none."""
        if not values:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p95 = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
        return cls(len(values), mean(values), median(values), p95, math.fsum(values))
