"""Errors of reading broken records, and checks of single values."""

from __future__ import annotations

BROKEN = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)
"""Errors of reading a broken or hostile record; they become a `TrajectoryFormatError`."""


def what_broke(error: BaseException) -> str:
    """Describes one of `BROKEN`."""
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def is_number(value: object) -> bool:
    """Returns whether a value from a file is a number to compute with."""
    is_integer = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**1000
    return is_integer or isinstance(value, float)
