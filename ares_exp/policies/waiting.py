"""Seconds that a request waits for something other than its response, reported as they pass."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

OnWait = Callable[[float], None]
"""Gets the seconds that a request waits for something other than its response."""


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


class Gate:
    """Is open at first. What has passed it is not called back."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        """Whether requests pass."""
        return self._opened.is_set()

    def open(self) -> None:
        """Lets all pass."""
        self._opened.set()

    def close(self) -> None:
        """Lets nothing pass."""
        self._opened.clear()

    async def passed(self, on_wait: OnWait) -> None:
        """Returns when it is open.

        Args:
            on_wait: Is told of the seconds that this takes, as they pass.
        """
        if self._opened.is_set():
            return
        with reported(on_wait):
            while not self._opened.is_set():  # it may be closed again before the waiting task runs
                await self._opened.wait()


MAX_PAUSES = 20
"""Pauses that one request sits out before it tries all the same, so that it never waits for ever."""


class RequestSlots:
    """Bounds the requests in progress at once. When the endpoint asks one of them to wait, all wait."""

    def __init__(self, count: int, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._count = count
        self._used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()  # first come, first served
        self._sleep = sleep
        self._paused_until = 0.0

    def resize(self, count: int) -> None:
        """Changes the bound; what is running above a smaller one goes on."""
        self._count = count
        self._give()

    def pause(self, seconds: float) -> None:
        """Gives out no slot for that long."""
        self._paused_until = max(self._paused_until, asyncio.get_running_loop().time() + seconds)

    @asynccontextmanager
    async def one(self, on_wait: OnWait) -> AsyncIterator[None]:
        """Holds a slot, and gives it back on leaving.

        Args:
            on_wait: Is told how long it takes to get one: before a pause is sat out, and while others have them all.
        """
        for _ in range(MAX_PAUSES):
            await self._acquire(on_wait)
            seconds = self._paused_until - asyncio.get_running_loop().time()
            if seconds <= 0:
                break
            self._release()
            on_wait(seconds)
            await self._sleep(seconds)
        else:
            await self._acquire(on_wait)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, on_wait: OnWait) -> None:
        if self._used < self._count and not self._waiting:
            self._used += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            with reported(on_wait):
                await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._waiting = deque(other for other in self._waiting if other is not place)
            else:  # it came at the same moment
                self._release()
            raise

    def _release(self) -> None:
        self._used -= 1
        self._give()

    def _give(self) -> None:
        while self._waiting and self._used < self._count:
            place = self._waiting.popleft()
            if not place.done():
                self._used += 1
                place.set_result(None)
