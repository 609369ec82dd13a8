"""`GymWrapper`, which turns an asynchronous environment into an ordinary `gymnasium.Env`.

It runs the coroutines of `AsyncGymWrapper` on an event loop in a separate thread. It also works in the vector
environments `SyncVectorEnv` and `AsyncVectorEnv`. The latter needs `shared_memory=False`, because shared memory cannot
contain chat requests. Pass a factory to vector environments, because a running environment cannot move to another
process.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import gymnasium

from ares_exp.cancellation import in_daemon_thread
from ares_exp.environment import EnvironmentBase, EnvironmentWrapper, MinimalEnvironment, TimeStep
from ares_exp.errors import EpisodeStateError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.wrappers.async_gym import RENDER_MODES, AsyncGymWrapper, EpisodeInfo, GymStep
from ares_exp.wrappers.loop_thread import CANCEL_GRACE_SEC, CLOSE_LIMIT_SEC, LoopThread

T = TypeVar("T")

_END_LIMIT_SEC = CLOSE_LIMIT_SEC + 6 * CANCEL_GRACE_SEC
Outcome = tuple[Any, BaseException | None]


class GymWrapper(gymnasium.Env[LLMRequest, LLMResponse]):
    """A `gymnasium.Env` that runs an asynchronous environment. Use it in a `with` block, which closes it at the end.

    From the first call until `close()`, the environment runs on one event loop in one thread. If you do not close a
    wrapper, it closes itself when it is garbage-collected or when the interpreter exits.

    Attributes:
        environment: The wrapped environment. Its methods may run only on the event loop of this wrapper.
        loop_thread: The thread in which the environment runs. Other threads can cancel a running call with its
            `interrupt()`.
    """

    # Gymnasium requires frames per second for every render mode; text has one frame per step.
    metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES), "render_fps": 1}  # noqa: RUF012  # as in Env

    def __init__(
        self, env: MinimalEnvironment, *, render_mode: str | None = None, allow_running_loop: bool = False
    ) -> None:
        """Wraps `env`. Closing the wrapper closes `env`.

        Args:
            env: The environment, which must not have been used on another event loop.
            render_mode: See `AsyncGymWrapper`.
            allow_running_loop: Whether calls inside a running event loop may block the loop. Set it in notebooks.

        Raises:
            ValueError: The render mode is unknown.
        """
        self._gym = AsyncGymWrapper(env, render_mode=render_mode)
        self.environment = env
        self.render_mode = render_mode
        self.loop_thread = LoopThread(f"gym of {type(env).__name__}")
        self._allow_running_loop = allow_running_loop
        self.observation_space = self._gym.observation_space
        self.action_space = self._gym.action_space
        self._finalizer = weakref.finalize(self, _close_used, self.loop_thread, self._gym)

    def reset(  # type: ignore[override]  # its `info` is a `dict[str, Any]`, with known keys
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[LLMRequest, EpisodeInfo]:
        """Starts an episode; see `AsyncGymWrapper.reset`.

        Raises:
            RuntimeError: `reset` was called inside a running event loop, after `close()`, or in a forked process after
                the parent process has started the environment.
        """
        super().reset(seed=seed)
        return self._run(lambda: self._gym.reset(seed=seed, options=options))

    def step(self, action: LLMResponse) -> GymStep:  # type: ignore[override]
        """Applies `action`; see `AsyncGymWrapper.step`. Raises the same errors as `reset`."""
        return self._run(lambda: self._gym.step(action))

    def render(self) -> str | None:
        """Returns the last response and the next observation as text if `render_mode` is `"ansi"`, otherwise `None`."""
        return self._gym.rendering()

    def close(self) -> None:
        """Cancels running calls of other threads, closes the environment, and ends the loop. Idempotent."""
        self._end(self._gym.close)

    def __enter__(self) -> GymWrapper:
        try:
            self._run(self._gym.__aenter__)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Closes the wrapped environment by calling its `__aexit__` with the exception, if any."""
        self._end(lambda: self._gym.__aexit__(exc_type, exc, traceback))
        return False

    def _run(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._check_no_running_loop()
        if not self._finalizer.alive:
            raise EpisodeStateError("This GymWrapper has been closed. Wrap a new environment.")
        return self.loop_thread.run(function())

    def _end(self, farewell: Callable[[], Awaitable[None]]) -> None:
        if self._finalizer.alive:
            self._check_no_running_loop()
            if self._finalizer.detach():
                self.loop_thread.close(farewell)

    def _check_no_running_loop(self) -> None:
        if self._allow_running_loop:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise RuntimeError(
            f"A {type(self).__name__} was called inside a running event loop, which it would block. In a notebook, "
            "pass `allow_running_loop=True` to `gymnasium.make` or `wrap_as_gym`. To await its methods, use "
            "`wrap_as_gym(ares_exp.make(…), async_mode=True)`."
        )


def _close_used(loop_thread: LoopThread, gym: AsyncGymWrapper) -> None:
    """Closes the environment if its thread was ever started. A new thread cannot be started at interpreter exit."""
    if loop_thread.is_started:
        loop_thread.close(gym.close)


class ThreadedGymDriver(EnvironmentWrapper):
    """A driver of a `GymWrapper`, whose methods it calls in other threads. It cannot access the pending requests there.

    If the task that awaits a method is cancelled, the coroutine of the environment is also cancelled. This may take up
    to `CANCEL_GRACE_SEC`.
    """

    def __init__(self, gym: GymWrapper) -> None:
        super().__init__(gym.environment)
        self._gym = gym

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode and returns its FIRST step."""
        given = dict(options) if options else None
        _, info = await self._call(lambda: self._gym.reset(seed=seed, options=given))
        return info["time_step"]  # type: ignore[no-any-return]

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action` and returns the next time step."""
        return (await self._call(lambda: self._gym.step(action)))[4]["time_step"]  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Closes the wrapper and the environment in it. Idempotent."""
        await self._end(self._gym.close)

    async def __aenter__(self) -> Self:
        try:
            await self._call(self._gym.__enter__)
        except BaseException:  # after a cancellation, the environment may be partly entered
            await self.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment by calling its `__aexit__` with the exception, if any."""
        await self._end(lambda: self._gym.__exit__(exc_type, exc, traceback))

    # There are no pending requests, so that the policy receives only one request at a time, as the observation.
    pending_requests = EnvironmentBase.pending_requests
    changed_requests = EnvironmentBase.changed_requests

    async def _end(self, farewell: Callable[[], object]) -> None:
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
    """Returns the result of a function that ran in a thread, or raises the original exception of the function."""
    value, error = job.result()
    if error is not None:
        try:
            raise error
        finally:
            del error  # breaks the cycle error -> traceback -> frame -> error
    return value


def drive_sync_gym(environment: MinimalEnvironment) -> ThreadedGymDriver:
    """Creates a driver that runs the environment through `GymWrapper`. The option `wrapper=sync` uses it.

    The environment runs on the wrapper's event loop. If it shares objects with other environments, these objects must
    therefore work on several event loops.
    """
    return ThreadedGymDriver(GymWrapper(environment))
