"""Waiting times before a failed request is sent again."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime


def backoff_sec(tries: int, *, base_sec: float, max_sec: float, rng: random.Random) -> float:
    """Returns the seconds to wait before a retry. The wait doubles with each failure (exponential backoff).

    Args:
        tries: Number of failed tries, from 1.
        base_sec: Maximum wait after the first failure. Each further failure doubles it.
        max_sec: Upper bound on every wait.
        rng: Random generator that shortens the wait by up to half, so that clients do not all retry at once. It only
            affects waits, not the results of a run.
    """
    return min(max_sec, base_sec * 2.0 ** min(tries - 1, 60)) * rng.uniform(0.5, 1.0)


def retry_after_sec(headers: Mapping[str, str], *, now: float | None = None) -> float | None:
    """Returns the wait, in seconds, that the header `Retry-After` requests; `None` if the header is missing or invalid.

    The header contains a number of seconds or an HTTP date.

    Args:
        headers: Response headers, by lower-case name.
        now: Current time in epoch seconds.
    """
    text = headers.get("retry-after", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - (time.time() if now is None else now)
        except (ValueError, OverflowError):
            return None
    return None if math.isnan(seconds) else max(0.0, seconds)
