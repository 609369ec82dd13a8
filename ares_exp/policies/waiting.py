"""Seconds that a request waits for something other than its answer, reported as they pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnWait = Callable[[float], None]
"""Gets the seconds that a request waits for something other than its answer."""


def nobody_waits(_: float) -> None:
    """An `OnWait` that does nothing."""


_WORTH_REPORTING_SEC = 0.01
_REPORT_EVERY_SEC = 1.0


@contextmanager
def reported(on_wait: OnWait) -> Iterator[None]:
    """Tells `on_wait` of the seconds spent inside as they pass, so that no time limit runs out meanwhile."""
    loop = asyncio.get_running_loop()
    since = loop.time()
    timer: asyncio.TimerHandle

    def report() -> None:
        nonlocal since
        now = loop.time()
        if now - since > _WORTH_REPORTING_SEC:
            on_wait(now - since)
            since = now

    def tick() -> None:
        nonlocal timer
        report()
        timer = loop.call_later(_REPORT_EVERY_SEC, tick)

    timer = loop.call_later(_REPORT_EVERY_SEC, tick)
    try:
        yield
    finally:
        timer.cancel()
        report()
