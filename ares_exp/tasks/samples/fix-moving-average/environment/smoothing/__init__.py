"""Averages over series of numbers."""

from smoothing.averages import exponential_average, moving_average

__all__ = ["exponential_average", "moving_average"]
