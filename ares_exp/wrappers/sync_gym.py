"""`GymWrapper`, which turns an asynchronous environment into an ordinary `gymnasium.Env`.

It runs the coroutines of `AsyncGymWrapper` on an event loop in a separate thread. Vector environments also work:
`SyncVectorEnv`, and `AsyncVectorEnv` with `shared_memory=False`, because shared memory cannot hold chat requests. Pass
them a factory that makes the environment, because a running environment cannot move to another process.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import gymnasium

from ares_exp.environment import MinimalEnvironment
from ares_exp.errors import EpisodeStateError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.wrappers.async_gym import RENDER_MODES, AsyncGymWrapper, EpisodeInfo, GymStep
from ares_exp.wrappers.loop_thread import LoopThread

T = TypeVar("T")


class GymWrapper(gymnasium.Env[LLMRequest, LLMResponse]):
    """Gives an environment the interface of `gymnasium.Env`. `with` closes the environment.

    From the first call until `close()`, the environment runs on one event loop in one thread. A wrapper that was used
    but not closed closes itself when it is garbage-collected or the interpreter exits.
    """

    # Gymnasium requires frames per second for every render mode; text has one frame per step.
    metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES), "render_fps": 1}  # noqa: RUF012  # as in Env

    def __init__(
        self, env: MinimalEnvironment, *, render_mode: str | None = None, allow_running_loop: bool = False
    ) -> None:
        """Wraps `env`, which the wrapper then owns.

        Args:
            env: The environment, which must not have been used on another event loop.
            render_mode: See `AsyncGymWrapper`.
            allow_running_loop: Whether calls inside a running event loop may block it. For notebooks.

        Raises:
            ValueError: The render mode is unknown.
        """
        self._gym = AsyncGymWrapper(env, render_mode=render_mode)
        self.render_mode = render_mode
        self._loop_thread = LoopThread(f"gym of {type(env).__name__}")
        self._allow_running_loop = allow_running_loop
        self.observation_space = self._gym.observation_space
        self.action_space = self._gym.action_space
        self._finalizer = weakref.finalize(self, _close_used, self._loop_thread, self._gym)

    @property
    def environment(self) -> MinimalEnvironment:
        """The wrapped environment. Its coroutines may only run on this wrapper's loop."""
        return self._gym.environment

    @property
    def loop_thread(self) -> LoopThread:
        """The thread in which the environment runs. Other threads can use it to interrupt a running call."""
        return self._loop_thread

    def reset(  # type: ignore[override]  # its `info` is a `dict[str, Any]`, with known keys
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[LLMRequest, EpisodeInfo]:
        """Starts an episode; see `AsyncGymWrapper.reset`.

        Raises:
            RuntimeError: `reset` was called inside a running event loop, after `close()`, or in a forked process that
                did not start the environment.
        """
        super().reset(seed=seed)
        return self._run(lambda: self._gym.reset(seed=seed, options=options))

    def step(self, action: LLMResponse) -> GymStep:  # type: ignore[override]
        """Applies `action`; see `AsyncGymWrapper.step`.

        Raises:
            RuntimeError: See `reset`.
        """
        return self._run(lambda: self._gym.step(action))

    def render(self) -> str | None:
        """Returns the last exchange as text if `render_mode` is `"ansi"`; see `AsyncGymWrapper.rendering`."""
        return self._gym.rendering()

    def close(self) -> None:
        """Cancels calls of other threads, closes the environment, and ends the loop. Idempotent."""
        self._end(self._gym.close)

    def __enter__(self) -> GymWrapper:
        """Enters the wrapped environment."""
        try:
            self._run(self._gym.__aenter__)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Passes the exception to the wrapped environment's `__aexit__`, which closes the environment."""
        self._end(lambda: self._gym.__aexit__(exc_type, exc, traceback))
        return False

    def _run(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._check_no_running_loop()
        if not self._finalizer.alive:
            raise EpisodeStateError("This GymWrapper has been closed. Wrap a new environment.")
        return self._loop_thread.run(function())

    def _end(self, farewell: Callable[[], Awaitable[None]]) -> None:
        if self._finalizer.alive:
            self._check_no_running_loop()
            if self._finalizer.detach():
                self._loop_thread.close(farewell)

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
    """Closes the environment if it was used. An unused environment has no resources.

    A thread to close it could not be started while the interpreter exits.
    """
    if loop_thread.is_started:
        loop_thread.close(gym.close)
