"""`wrapper=sync`, which runs the blocking methods of a `GymWrapper` in threads and awaits them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ares_exp.cancellation import in_daemon_thread
from ares_exp.environment import MinimalEnvironment, PendingRequest
from ares_exp.errors import EpisodeStateError
from ares_exp.wrappers.async_gym import EpisodeInfo, GymDriver, GymStep
from ares_exp.wrappers.loop_thread import CANCEL_GRACE_SEC, CLOSE_LIMIT_SEC
from ares_exp.wrappers.sync_gym import GymWrapper

_END_LIMIT_SEC = CLOSE_LIMIT_SEC + 6 * CANCEL_GRACE_SEC
Outcome = tuple[Any, BaseException | None]


class GymInThread:
    """Asynchronous versions of the methods of a `GymWrapper`.

    If the awaiting task is cancelled, the environment's coroutine is also cancelled, and may take `CANCEL_GRACE_SEC` to
    unwind.
    """

    def __init__(self, gym: GymWrapper) -> None:
        """Stores `gym`, which this object closes."""
        self._gym = gym
        self._is_closed = False

    @property
    def environment(self) -> MinimalEnvironment:
        """The environment that `gym` wraps."""
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
        """Closes the wrapper and the environment in it. Idempotent."""
        await self._end(self._gym.close)

    async def __aenter__(self) -> GymInThread:
        """Enters the environment."""
        try:
            await self._call(self._gym.__enter__)
        except BaseException:  # after a cancellation, the environment may be partly entered
            await self.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Passes the exception to the environment's `__aexit__`, which closes the environment."""
        await self._end(lambda: self._gym.__exit__(exc_type, exc, traceback))

    async def _end(self, farewell: Callable[[], object]) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        job = self._start(farewell)
        try:
            await asyncio.wait({job}, timeout=_END_LIMIT_SEC)
        except asyncio.CancelledError:  # closing must finish, because it releases the environment's resources
            await asyncio.wait({job}, timeout=CANCEL_GRACE_SEC)
            raise
        if not job.done():
            raise TimeoutError(f"The environment was not closed within {_END_LIMIT_SEC:g} s.")
        _result(job)

    async def _call(self, function: Callable[[], Any]) -> Any:
        if self._is_closed:
            raise EpisodeStateError("This environment has been closed. Build a new one.")
        job = self._start(function)
        try:
            await asyncio.wait({job})  # unlike `await job`, does not cancel the job if this task is cancelled
        except asyncio.CancelledError:
            self._gym.loop_thread.interrupt()
            await asyncio.wait({job}, timeout=CANCEL_GRACE_SEC)
            raise
        return _result(job)

    def _start(self, function: Callable[[], Any]) -> asyncio.Future[Outcome]:
        def outcome() -> Outcome:
            try:
                return function(), None
            except BaseException as error:  # a future would replace some exceptions with other objects
                return None, error

        self._gym.loop_thread.resume()
        return in_daemon_thread(outcome)


def _result(job: asyncio.Future[Outcome]) -> Any:
    """Returns the function's result, or raises its original exception object."""
    value, error = job.result()
    if error is not None:
        try:
            raise error
        finally:
            del error  # breaks the cycle error -> traceback -> frame -> error
    return value


class ThreadedGymDriver(GymDriver):
    """Runs an environment on another event loop, where its pending requests cannot be accessed."""

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns an empty tuple, so that the policy gets one request at a time."""
        return ()

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Never returns, because `pending_requests` is always empty."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable: nobody sets the event")


def drive_sync_gym(environment: MinimalEnvironment) -> GymDriver:
    """Creates a driver that runs the environment through `GymWrapper`, for `wrapper=sync`.

    The environment runs on the wrapper's event loop, not on the caller's loop. Objects that it shares with other
    environments must not be bound to an event loop.
    """
    return ThreadedGymDriver(GymInThread(GymWrapper(environment)))
