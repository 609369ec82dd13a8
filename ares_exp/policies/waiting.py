"""Tools that make requests wait before they are sent: a gate that holds them back, and slots that limit their number.

Waits are reported to the episode, so that its time limits do not include them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

OnWait = Callable[[float], None]
"""Callback that receives the seconds for which a request waits for anything except its response, such as a slot."""


def nobody_waits(_: float) -> None:
    """Does nothing. Default `OnWait` callback."""


async def at_once() -> None:
    """Returns immediately. Default of the hook `EpisodeSpec.may_ask`."""


_WORTH_REPORTING_SEC = 0.01
_REPORT_EVERY_SEC = 1.0


@contextmanager
def reported(on_wait: OnWait) -> Iterator[None]:
    """Reports the time spent in the block to `on_wait` every second, so that time limits do not include it."""
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
    """A gate that holds back requests while it is closed. It is open at first.

    Several holders can close the gate. It opens only when each of them has opened it again. Closing it does not affect
    requests that have already passed.
    """

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._holders: set[object] = set()

    def open(self, by: object = "order") -> None:
        """Opens the gate for the holder `by`. Requests pass if no other holder has closed the gate."""
        self._holders.discard(by)
        if not self._holders:
            self._opened.set()

    def close(self, by: object = "order") -> None:
        """Closes the gate for the holder `by`. No requests pass until this holder opens it again."""
        self._holders.add(by)
        self._opened.clear()

    async def passed(self, on_wait: OnWait) -> None:
        """Waits until the gate is open. Reports the seconds of the wait to `on_wait` at regular intervals."""
        if self._opened.is_set():  # the usual case
            return
        with reported(on_wait):
            while not self._opened.is_set():  # the gate may be closed again before this task runs
                await self._opened.wait()


MAX_PAUSES = 20
"""Maximum number of pauses for which a request waits. After that, it gets a slot even during a pause."""


class RequestSlots:
    """Slots that limit the number of concurrent requests to an endpoint.

    If the endpoint demands that one request waits, `pause` makes all requests wait.
    """

    def __init__(self, count: int, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._count = count
        self._used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()  # first come, first served
        self._sleep = sleep
        self._paused_until = 0.0

    def resize(self, count: int) -> None:
        """Changes the number of slots. If the number decreases, running requests are not cancelled."""
        self._count = count
        self._give()

    def pause(self, seconds: float) -> None:
        """Makes all requests that need a slot wait for at least `seconds`."""
        self._paused_until = max(self._paused_until, asyncio.get_running_loop().time() + seconds)

    @asynccontextmanager
    async def one(self, on_wait: OnWait) -> AsyncIterator[None]:
        """Waits for a slot, and holds it until the context exits. Reports the seconds of the wait to `on_wait`."""
        for pauses in itertools.count():
            await self._acquire(on_wait)
            seconds = self._paused_until - asyncio.get_running_loop().time()
            if seconds <= 0 or pauses == MAX_PAUSES:
                break
            self._release()
            on_wait(seconds)
            await self._sleep(seconds)
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
            else:  # the slot was assigned just before the cancellation
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
