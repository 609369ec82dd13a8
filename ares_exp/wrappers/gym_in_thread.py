"""`wrapper=sync`: the blocking methods of a `GymWrapper`, each awaited in a thread."""

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
    """The methods of a `GymWrapper`, to be awaited.

    Cancelling an awaiting task cancels the environment's coroutine and waits, bounded, for it to unwind.
    """

    def __init__(self, gym: GymWrapper) -> None:
        """Takes over `gym`."""
        self._gym = gym
        self._is_closed = False

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
        """Closes the wrapper and the environment in it. Idempotent."""
        await self._end(self._gym.close)

    async def __aenter__(self) -> GymInThread:
        """Enters the environment."""
        try:
            await self._call(self._gym.__enter__)
        except BaseException:  # after a cancellation, it is unknown how far the task came
            await self.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the environment, which gets the exception."""
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
            await asyncio.wait({job})  # unlike awaiting it, does not cancel it when this task is cancelled
        except asyncio.CancelledError:
            self._gym.loop_thread.interrupt()
            await asyncio.wait({job}, timeout=CANCEL_GRACE_SEC)
            raise
        return _result(job)

    def _start(self, function: Callable[[], Any]) -> asyncio.Future[Outcome]:
        def outcome() -> Outcome:
            try:
                return function(), None
            except BaseException as error:  # a future would replace some exceptions by other objects
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
    """Runs an environment on another event loop. Its pending requests are only accessible there."""

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns nothing, so that the policy is asked for one response after the other."""
        return ()

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Never returns: see `pending_requests`."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable: nobody sets the event")


def drive_sync_gym(environment: MinimalEnvironment) -> GymDriver:
    """Drives the environment through `GymWrapper`, called from the driver's own thread, for `wrapper=sync`.

    The environment then runs on the wrapper's event loop, not on the caller's. Objects that it shares with other
    environments must not be bound to a loop.
    """
    return ThreadedGymDriver(GymInThread(GymWrapper(environment)))
