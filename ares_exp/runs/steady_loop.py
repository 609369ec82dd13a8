"""The event loop of a run. Its clock, and therefore every time limit, stands still while the process is stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

TICK_SEC = 1.0
STOPPED_SEC = 5.0
"""Minimum gap between two clock readings, in seconds, for a process that used little CPU to count as stopped."""

_T = TypeVar("_T")


class SteadyEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock does not advance while this process is stopped (by Ctrl-Z or SIGSTOP)."""

    def __init__(self) -> None:
        """Creates the loop with a callback every second, so that an idle loop also notices a stopped process."""
        self._stopped_for_sec = 0.0
        self._last_seen, self._cpu_at_tick = time.monotonic(), time.process_time()
        super().__init__()
        self._tick()

    def time(self) -> float:
        """Returns the time of a monotonic clock in seconds, without the time in which the process was stopped."""
        now = time.monotonic()
        gap, self._last_seen = now - self._last_seen, now
        if gap > STOPPED_SEC and time.process_time() - self._cpu_at_tick < gap / 2:
            self._stopped_for_sec += gap
        return now - self._stopped_for_sec

    def _tick(self) -> None:
        self._cpu_at_tick = time.process_time()
        self.call_later(TICK_SEC, self._tick)


def run_steadily(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to its end in a new `SteadyEventLoop`, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=SteadyEventLoop) as runner:
        return runner.run(main)
