"""Rows of the table of containers in docs/numbers.md: docker-py used the plain way beside ours."""

import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

HEADER = "| what | docker-py | ours | ratio |\n|---|---|---|---|"


async def timed(what: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """Milliseconds and result."""
    start = time.perf_counter()
    result = await what()
    return (time.perf_counter() - start) * 1000, result


def latency(what: str, theirs: list[float], ours: list[float]) -> None:
    """Prints medians of milliseconds, their 90th percentiles, and how many times quicker ours is."""
    ratio = statistics.median(theirs) / statistics.median(ours)
    print(f"| {what} | {_cell(theirs)} | {_cell(ours)} | {ratio:.1f}x |", flush=True)


def throughput(what: str, theirs: float, ours: float) -> None:
    """Prints rates per second, and how many times higher ours is."""
    print(f"| {what} | {theirs:.0f} /s | {ours:.0f} /s | {ours / theirs:.1f}x |", flush=True)


def _cell(values: list[float]) -> str:
    p90 = sorted(values)[int(len(values) * 0.9)]
    return f"{statistics.median(values):.3g} ms (p90 {p90:.3g}, n={len(values)})"
