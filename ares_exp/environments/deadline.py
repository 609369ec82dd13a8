"""The time limit of an episode, moved by delays that are not the episode's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DeadlinePassedError(Exception):
    """The time of an episode is up: it is to be truncated."""


class Deadline:
    """The moment at which an episode must end."""

    def __init__(self, limit_sec: float | None) -> None:
        """Starts the time; `None` is no limit."""
        self._at = None if limit_sec is None else time.monotonic() + limit_sec
        self._timer: asyncio.Timeout | None = None

    @property
    def left_sec(self) -> float | None:
        """Seconds that are left, 0 when none are; `None` without a limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def move(self, seconds: float) -> None:
        """Puts it off, unless it has passed. To be called where the episode is played."""
        if self._at is None or not self.left_sec or (self._timer is not None and self._timer.expired()):
            return
        self._at += seconds
        if self._timer is not None:
            self._timer.reschedule(self._when())

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Cancels the body when the time is up, also if it was put off meanwhile.

        Raises:
            DeadlinePassedError: The time is up.
        """
        timer = asyncio.timeout_at(self._when())
        try:
            async with timer:
                self._timer = timer
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            raise DeadlinePassedError from None
        finally:
            self._timer = None

    def _when(self) -> float | None:
        left = self.left_sec
        return None if left is None else asyncio.get_running_loop().time() + left
