"""Checks of what was read from a file, and what they raise."""

from __future__ import annotations

MAX_INTEGER_BITS = 1000
"""What fits into a float: of longer integers nothing could be computed."""

BROKEN = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)
"""What reading a broken or hostile record raises, before it is told as a `TrajectoryFormatError`."""


def what_broke(error: BaseException) -> str:
    """One of `BROKEN` in words."""
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def has_type(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of these types; a boolean is no integer, and no number is absurdly long."""
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        return False
    return isinstance(value, kinds) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether something read from a file is a number that can be computed with."""
    return has_type(value, (int, float))
