"""Slots for concurrent requests, all of them closed while the endpoint has asked to wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from ares_exp.asking.waiting import OnWait, reported

MAX_PAUSES = 20
"""Pauses that one request sits out before it tries all the same, so that it never waits for ever."""


class RequestSlots:
    """Bounds the requests under way at once. When the endpoint asks one of them to wait, all wait."""

    def __init__(self, count: int, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._free = asyncio.Semaphore(count)
        self._sleep = sleep
        self._paused_until = 0.0

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
            self._free.release()
            on_wait(seconds)
            await self._sleep(seconds)
        else:
            await self._acquire(on_wait)
        try:
            yield
        finally:
            self._free.release()

    async def _acquire(self, on_wait: OnWait) -> None:
        if not self._free.locked():
            await self._free.acquire()
            return
        with reported(on_wait):
            await self._free.acquire()
