"""An event loop in a daemon thread, for callers that are not asynchronous.

The loop also runs between calls, because the agent of an environment is a coroutine that continues to run. If each call
had its own loop (`asyncio.run`), the agent would be cancelled at the end of the call.

The calling thread passes a `LoopCall` to the loop (`call_soon_threadsafe`) and waits for the lock of the call. The loop
runs the coroutine in a separate task, and then releases the lock. The caller gets the original result or exception.
(Futures of `concurrent.futures` would be slower, and would replace a `TimeoutError`.)
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")

CANCEL_GRACE_SEC = 5.0
"""Maximum time in seconds to wait for the end of a cancelled coroutine."""
SIGNAL_CHECK_SEC = 1.0
"""Interval in seconds at which a waiting thread wakes up, so that Ctrl-C works even if it cannot interrupt the wait."""


class LoopCall(Generic[T]):
    """One call of a coroutine on the loop: carries the coroutine to the loop, and its result to the waiting thread."""

    __slots__ = ("_coroutine", "_done", "_error", "_finished", "_timer", "_value", "task")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Stores the coroutine. At the end, the waiting thread must call `drop`."""
        self._coroutine = coroutine
        self._value: T | None = None
        self._error: BaseException | None = None
        self._finished = False
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def start(self) -> None:
        """Starts the coroutine. Called in the loop's thread."""
        if not self._finished:
            self.task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """Cancels the coroutine. The waiting thread continues after at most `CANCEL_GRACE_SEC`.

        Called in the loop's thread. Further calls have no effect.
        """
        if self.task is None:
            self.finish(asyncio.CancelledError())
        elif not self._finished and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(CANCEL_GRACE_SEC, self.finish, asyncio.CancelledError())
            loop.call_soon(self.task.cancel)  # deferred, because a task that never starts does not call `finish`

    def finish(self, error: BaseException | None = None) -> None:
        """Lets the waiting thread continue. If `error` is given, `result` raises it. Called in the loop's thread."""
        if not self._finished:
            self._finished = True
            self._error = error
            if self._timer is not None:
                self._timer.cancel()
            self._done.release()

    def wait(self, limit_sec: float) -> bool:
        """Waits until the call has ended. Returns false if `limit_sec` passes first. Called in the waiting thread."""
        deadline = time.monotonic() + limit_sec
        while (left := deadline - time.monotonic()) > 0:
            if self._done.acquire(timeout=min(left, SIGNAL_CHECK_SEC)):
                return True
        return False

    def give_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancels the call, and waits at most `CANCEL_GRACE_SEC` for its end. Called in the waiting thread."""
        with suppress(RuntimeError):  # the loop and the call have ended
            loop.call_soon_threadsafe(self.cancel)
            self.wait(CANCEL_GRACE_SEC)

    def drop(self) -> None:
        """Closes a coroutine that was never started, so that Python does not warn. Called by the waiting thread."""
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
        return self._value  # type: ignore[return-value]  # set if there is no error

    async def _run(self) -> None:
        try:
            self._value = await self._coroutine
        except BaseException as error:  # the waiting thread gets every exception; SystemExit would end the loop here
            self.finish(error)
        else:
            self.finish()


logger = logging.getLogger(__name__)

CLOSE_LIMIT_SEC = 30.0
"""Maximum time in seconds for which `LoopThread.close` awaits `farewell`."""


class LoopThread:
    """Runs coroutines for other threads on one event loop. The loop's thread starts at the first call."""

    def __init__(self, name: str = "event loop") -> None:
        self._name = name
        self._calls: set[LoopCall[Any]] = set()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._pid: int | None = None
        self._interrupted = False
        self._closed = False

    @property
    def is_started(self) -> bool:
        """Whether the thread was ever started."""
        return self._loop is not None

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T:
        """Runs `coroutine` on the loop and waits for it. Returns its result or raises its original exception.

        An exception in the waiting thread, such as `KeyboardInterrupt`, cancels the coroutine. The thread then waits at
        most `CANCEL_GRACE_SEC` for the coroutine to end, and raises the exception.

        Raises:
            TimeoutError: The coroutine took longer than `timeout` seconds, and was cancelled.
            asyncio.CancelledError: Another thread called `interrupt()` or `close()`.
            RuntimeError: The loop thread is closed, belongs to the parent process, or is the calling thread.
        """
        call = LoopCall(coroutine)
        self._calls.add(call)
        try:
            if self._closed:
                raise RuntimeError(f"The thread {self._name!r} has been closed.")
            if self._is_inherited():
                raise RuntimeError(
                    f"The thread {self._name!r} was started by process {self._pid} and does not exist in its fork "
                    f"{os.getpid()}. Build the environment in the worker process: pass a factory to it, not an "
                    "environment."
                )
            if self._is_own_thread():
                raise RuntimeError(f"The thread {self._name!r} cannot wait for itself: await the coroutine instead.")
            loop = self._loop or self._start()
            if self._interrupted:  # checked after `add`, because `interrupt` sets it before it iterates over the calls
                raise asyncio.CancelledError
            return self._perform(call, loop, timeout)
        finally:
            self._calls.discard(call)
            call.drop()

    def interrupt(self) -> None:
        """Cancels the running calls, and all further calls until `resume()`. Call it from another thread."""
        self._interrupted = True
        loop = self._loop
        if loop is not None and not self._is_inherited():
            for call in tuple(self._calls):
                with suppress(RuntimeError):  # the loop and the call have ended
                    loop.call_soon_threadsafe(call.cancel)

    def resume(self) -> None:
        """Allows calls again after `interrupt()`."""
        self._interrupted = False

    def close(self, farewell: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancels the running calls, awaits `farewell`, cancels all other tasks, and ends the loop and its thread.

        Each of these steps has a time limit, which is `CLOSE_LIMIT_SEC` for `farewell`. Exceptions of `farewell` are
        raised. A second call, or a call in a forked process, has no effect. A call in the loop's own thread, which
        garbage collection can cause, does not wait.
        """
        if self._closed or self._is_inherited():
            return
        loop = self._loop if farewell is None else self._start()
        self._closed = True
        if loop is None:
            return
        call = LoopCall(_wind_up(self._calls, farewell, self._stop))
        if self._is_own_thread():
            call.start()
            return
        try:
            self._perform(call, loop, CLOSE_LIMIT_SEC + 2 * CANCEL_GRACE_SEC)
        finally:
            with suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(_release, self._stop)
            if self._thread is not None:
                self._thread.join(3 * CANCEL_GRACE_SEC)
                if self._thread.is_alive():
                    logger.warning("The thread %r is still alive: something on its event loop blocks it.", self._name)

    def _perform(self, call: LoopCall[T], loop: asyncio.AbstractEventLoop, timeout: float | None) -> T:
        try:
            loop.call_soon_threadsafe(call.start)
            if not call.wait(math.inf if timeout is None else timeout):
                raise TimeoutError(f"A call on the thread {self._name!r} did not end within {timeout:g} s.")
        except BaseException:
            call.give_up(loop)
            raise
        return call.result()

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._stop = loop.create_future()
                arguments = (loop, self._stop, self._calls)  # not `self`, which would then never be garbage-collected
                self._thread = threading.Thread(target=_serve, args=arguments, name=self._name, daemon=True)
                self._pid = os.getpid()
                self._thread.start()
                self._loop = loop
            return self._loop

    def _is_inherited(self) -> bool:
        return self._pid is not None and self._pid != os.getpid()

    def _is_own_thread(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()


def _serve(loop: asyncio.AbstractEventLoop, stop: asyncio.Future[None], calls: set[LoopCall[Any]]) -> None:
    """Runs the loop until the future `stop` is done, then cancels all tasks that are still running.

    Always lets the waiting threads continue, even if the loop ended with an error.
    """
    try:
        while not stop.done():
            with suppress(SystemExit, KeyboardInterrupt):  # an agent's `sys.exit()`; its caller gets it
                loop.run_until_complete(stop)
        loop.run_until_complete(_cancel_rest())
    finally:
        loop.close()
        for call in tuple(calls):
            call.finish(RuntimeError("The thread of the event loop ended before the call finished."))


async def _wind_up(
    calls: set[LoopCall[Any]], farewell: Callable[[], Awaitable[None]] | None, stop: asyncio.Future[None] | None
) -> None:
    in_progress = list(calls)
    try:
        for call in in_progress:
            call.cancel()
        await _wait(call.task for call in in_progress)
        if farewell is not None:
            async with asyncio.timeout(CLOSE_LIMIT_SEC):
                await farewell()
    finally:
        _release(stop)


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await _wait(rest)
    with suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_GRACE_SEC):
            await asyncio.get_running_loop().shutdown_asyncgens()


async def _wait(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    pending = {task for task in tasks if task is not None}
    if pending:
        await asyncio.wait(pending, timeout=CANCEL_GRACE_SEC)


def _release(stop: asyncio.Future[None] | None) -> None:
    if stop is not None and not stop.done():
        stop.set_result(None)
