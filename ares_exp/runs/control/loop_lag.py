"""Lag of the event loop, and the call that blocks it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

TICK_SEC = 0.25
LOOK_SEC = 1.0
BLOCKED_SEC = 5.0
_STOP_TIMEOUT_SEC = 2.0
_SHOWN_CALLS = 8


class LoopLag:
    """A timer on the event loop compares when it runs with when it should: the difference is the lag.

    A thread looks after the timer. While it is late by more than `blocked_sec`, the thread reports, once, what the loop
    is doing: the call that every episode waits for.

    Attributes:
        max_sec: The longest lag of all.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        *,
        tick_sec: float = TICK_SEC,
        look_sec: float = LOOK_SEC,
        blocked_sec: float = BLOCKED_SEC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keeps the arguments; `start` starts to measure.

        Args:
            warn: Is given the sentence about a blocked loop, in the thread: the loop cannot.
            tick_sec: Seconds between two measurements.
            look_sec: Seconds between two looks of the thread.
            blocked_sec: Seconds after which a loop counts as blocked.
            clock: Seconds that only grow.
        """
        self.max_sec = 0.0
        self._warn = warn
        self._tick_sec = tick_sec
        self._look_sec = look_sec
        self._blocked_sec = blocked_sec
        self._clock = clock
        self._due = clock()
        self._reported_due: float | None = None
        self._sum, self._count, self._max = 0.0, 0, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop_thread = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts timer and thread on the running event loop."""
        self._loop_thread = threading.get_ident()
        self._schedule()
        self._thread = threading.Thread(target=self._look_after, name="loop-lag", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends timer and thread. Idempotent."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_SEC)
            self._thread = None

    def take(self) -> tuple[float, float]:
        """Returns longest and mean lag in seconds since the last call. Must be called on the event loop."""
        if (late := self._clock() - self._due) > 0:
            self._measure(late)
        longest, mean = self._max, self._sum / max(self._count, 1)
        self._sum, self._count, self._max = 0.0, 0, 0.0
        return longest, mean

    def _schedule(self) -> None:
        self._due = self._clock() + self._tick_sec
        self._timer = asyncio.get_running_loop().call_later(self._tick_sec, self._tick)

    def _tick(self) -> None:
        self._measure(max(self._clock() - self._due, 0.0))
        self._schedule()

    def _measure(self, lag: float) -> None:
        self._sum, self._count = self._sum + lag, self._count + 1
        self._max, self.max_sec = max(self._max, lag), max(self.max_sec, lag)

    def _look_after(self) -> None:
        """Runs in the thread. If the thread itself is late, the whole process was stopped, and no call is to blame."""
        awake_since = before = self._clock()
        while not self._stopped.wait(self._look_sec):
            now = self._clock()
            if now - before > self._look_sec + 1:
                awake_since = now
            before = now
            due = self._due
            late = now - max(due, awake_since)
            if late > self._blocked_sec and due != self._reported_due:
                self._reported_due = due
                self._report(late)

    def _report(self, late: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        self._warn(
            f"The event loop has been blocked for {late:.0f} s: no episode goes on meanwhile. It is in "
            f"{_calls(frame)}. What takes so long belongs in a thread (`asyncio.to_thread`)."
        )


def _calls(frame: FrameType | None) -> str:
    """Formats the call stack that ends in `frame`, innermost call first, up to the event loop's first call."""
    calls: list[str] = []
    while frame is not None and len(calls) < _SHOWN_CALLS:
        code = frame.f_code
        if code.co_filename == asyncio.events.__file__:
            break
        calls.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return ", called by ".join(calls) or "no Python code"
