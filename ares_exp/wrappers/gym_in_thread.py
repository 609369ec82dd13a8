"""`GymInThread`: awaits the blocking methods of a `GymWrapper`, which run in one worker thread."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ares_exp.environment import MinimalEnvironment, PendingRequest
from ares_exp.errors import EpisodeStateError
from ares_exp.wrappers.async_gym import EpisodeInfo, GymDriver, GymStep
from ares_exp.wrappers.loop_thread import CANCEL_GRACE_SEC, CLOSE_LIMIT_SEC
from ares_exp.wrappers.sync_gym import GymWrapper

_END_LIMIT_SEC = CLOSE_LIMIT_SEC + 6 * CANCEL_GRACE_SEC
_JOIN_LIMIT_SEC = 1.0


class GymInThread:
    """The methods of a `GymWrapper`, to be awaited.

    Cancelling an awaiting task cancels the environment's coroutine and waits, bounded, for it to unwind. The worker is
    a separate daemon thread: a pool's threads are joined when the interpreter exits, forever if one is stuck.
    """

    def __init__(self, gym: GymWrapper) -> None:
        """Takes over `gym`, which only the worker thread calls from now on."""
        self._gym = gym
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=_work, args=(self._jobs,), name="gym caller", daemon=True)
        self._dismiss_worker = weakref.finalize(self, self._jobs.put, None)

    @property
    def environment(self) -> MinimalEnvironment:
        """The environment in the wrapper."""
        return self._gym.environment

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, EpisodeInfo]:
        """Starts an episode."""
        given = dict(options) if options else None
        result: tuple[Any, EpisodeInfo] = await self._call(lambda: self._gym.reset(seed=seed, options=given))
        return result

    async def step(self, action: Any) -> GymStep:
        """Applies `action`."""
        result: GymStep = await self._call(lambda: self._gym.step(action))
        return result

    async def close(self) -> None:
        """Closes the wrapper and the environment in it, and ends the thread. Idempotent."""
        await self._end(self._gym.close)

    async def __aenter__(self) -> GymInThread:
        """Enters the environment."""
        try:
            await self._call(self._gym.__enter__)
        except BaseException:  # a cancelled task does not know how far it came
            await self.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the environment, which learns why, and ends the thread."""
        await self._end(lambda: self._gym.__exit__(exc_type, exc, traceback))

    async def _end(self, farewell: Callable[[], object]) -> None:
        if not self._dismiss_worker.alive:
            return
        job = self._submit(farewell)
        try:
            await asyncio.wait({job.done}, timeout=_END_LIMIT_SEC)
        except asyncio.CancelledError:  # closing is not cut short: it releases what the environment holds
            await asyncio.wait({job.done}, timeout=CANCEL_GRACE_SEC)
            raise
        finally:
            self._dismiss_worker()
        if not job.done.done():
            raise TimeoutError(f"The environment was not closed within {_END_LIMIT_SEC:g} s.")
        self._worker.join(_JOIN_LIMIT_SEC)  # it has nothing left to do: microseconds
        job.result()

    async def _call(self, function: Callable[[], Any]) -> Any:
        if not self._dismiss_worker.alive:
            raise EpisodeStateError("This environment has been closed. Build a new one.")
        job = self._submit(function)
        try:
            await asyncio.wait({job.done})  # unlike awaiting it, leaves it alone when this task is cancelled
        except asyncio.CancelledError:
            await job.cancel()
            raise
        return job.result()

    def _submit(self, function: Callable[[], Any]) -> _Job:
        if self._worker.ident is None:
            self._worker.start()
        job = _Job(self._gym, function)
        self._jobs.put(job)
        return job


class _Job:
    """One call that the worker makes."""

    def __init__(self, gym: GymWrapper, function: Callable[[], Any]) -> None:
        self._gym = gym
        self._function = function
        self._context = contextvars.copy_context()
        self._loop = asyncio.get_running_loop()
        self._cancelled = False
        self._value: Any = None
        self._error: BaseException | None = None
        self.done: asyncio.Future[None] = self._loop.create_future()

    def perform(self) -> None:
        """Calls the function in the worker; its result or error is passed to the awaiting task alone."""
        self._gym.loop_thread.resume()  # before the look at `_cancelled`: `cancel` sets that first
        try:
            if not self._cancelled:
                self._value = self._context.run(self._function)
        except BaseException as error:
            self._error = error
        try:
            self._loop.call_soon_threadsafe(self._report)
        except RuntimeError:  # the awaiting loop is closed
            return

    async def cancel(self) -> None:
        """Interrupts the call and waits until it has unwound or the grace is over."""
        self._cancelled = True
        if not self.done.done():
            self._gym.loop_thread.interrupt()
            await asyncio.wait({self.done}, timeout=CANCEL_GRACE_SEC)

    def result(self) -> Any:
        """Returns the function's result, or raises its exception, the same object."""
        error, self._error = self._error, None  # breaks the cycle error -> traceback -> frame -> self -> error
        if error is not None:
            try:
                raise error
            finally:
                del error
        return self._value

    def _report(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Runs the worker: one call after another, until it receives None."""
    while (job := jobs.get()) is not None:
        job.perform()
        del job  # or it would keep its objects alive, the wrapper above all, until the next one


class ThreadedGymDriver(GymDriver):
    """Plays through a face whose environment is on another event loop, where alone its requests can be looked at."""

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns none: the policy is asked for one answer after the other."""
        return ()

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Never returns: see `pending_requests`."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable: nobody sets the event")


def drive_sync_gym(environment: MinimalEnvironment) -> GymDriver:
    """Drives the environment through `GymWrapper`, called from the driver's own thread, for `wrapper=sync`.

    The environment then runs on the wrapper's event loop, not on the caller's: what it shares with other environments
    must not be bound to a loop.
    """
    return ThreadedGymDriver(GymInThread(GymWrapper(environment)))
