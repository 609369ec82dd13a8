"""How long to wait before something is tried again."""

from __future__ import annotations

import random


def backoff_sec(tries: int, *, base_sec: float, max_sec: float, rng: random.Random) -> float:
    """Exponential backoff with jitter, in seconds.

    Args:
        tries: How many tries failed, from 1.
        base_sec: Longest wait after the first; doubled after each further one.
        max_sec: Longest wait of all.
        rng: Source of the jitter, which takes off up to half. Timing only: no result depends on it.
    """
    return min(max_sec, base_sec * 2.0 ** min(tries - 1, 60)) * rng.uniform(0.5, 1.0)
