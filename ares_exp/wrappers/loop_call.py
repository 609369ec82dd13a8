"""`LoopCall`: one coroutine on its way from a waiting thread to an event loop, and its outcome on the way back.

A plain lock is what the thread waits on: it is cheap, and a signal interrupts it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")

CANCEL_GRACE_SEC = 5.0
"""Seconds that a cancelled coroutine has to unwind; then the waiting thread is released."""
SIGNAL_CHECK_SEC = 1.0
"""Maximum delay of a Ctrl-C in seconds: one that arrives just before the lock sleeps does not wake it."""


class LoopCall(Generic[T]):
    """One coroutine on its way to the loop, and its outcome on the way back. Once only."""

    __slots__ = ("_coroutine", "_done", "_error", "_finished", "_timer", "_value", "task")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Takes over `coroutine`; the waiting thread must call `drop` at the end."""
        self._coroutine = coroutine
        self._value: T | None = None
        self._error: BaseException | None = None
        self._finished = False
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def start(self) -> None:
        """Starts the coroutine. Called on the loop."""
        if not self._finished:
            self.task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """Cancels the coroutine once; releases a waiting thread after the grace period at the latest. On the loop."""
        if self.task is None:
            self.finish(asyncio.CancelledError())
        elif not self._finished and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(CANCEL_GRACE_SEC, self.finish, asyncio.CancelledError())
            loop.call_soon(self.task.cancel)  # soon: a task cancelled before its first step would never report back

    def finish(self, error: BaseException | None = None) -> None:
        """Releases the waiting thread."""
        if not self._finished:
            self._finished = True
            self._error = error
            if self._timer is not None:
                self._timer.cancel()
            self._done.release()

    def wait(self, limit_sec: float) -> bool:
        """Waits and returns whether the call ended within the limit. Called in the waiting thread."""
        deadline = time.monotonic() + limit_sec
        while (left := deadline - time.monotonic()) > 0:
            if self._done.acquire(timeout=min(left, SIGNAL_CHECK_SEC)):
                return True
        return False

    def give_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancels the call and waits until it has unwound or the grace period is over. Called in the waiting thread."""
        with suppress(RuntimeError):  # the loop has ended, the call with it
            loop.call_soon_threadsafe(self.cancel)
            self.wait(CANCEL_GRACE_SEC)

    def drop(self) -> None:
        """Drops the coroutine if it was never started. Called last, in the waiting thread."""
        if self.task is None:
            self._coroutine.close()

    def result(self) -> T:
        """Returns the coroutine's result, or raises its exception. Called in the waiting thread."""
        error, self._error = self._error, None  # breaks the cycle error -> traceback -> frame -> self -> error
        if error is not None:
            try:
                raise error
            finally:
                del error
        return self._value  # type: ignore[return-value]  # set when there is no error

    async def _run(self) -> None:
        try:
            self._value = await self._coroutine
        except BaseException as error:  # all of it belongs to the waiting thread; SystemExit would end the loop here
            self.finish(error)
        else:
            self.finish()
