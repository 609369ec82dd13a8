"""Drivers: how the runner plays an environment. Directly, or through one of its Gymnasium faces.

A driver is an environment again (`reset`, `step`, `close`, `async with`), so the rollout loop is the same for all
three, and so are the time steps, the exceptions and what cancelling a call does. `conf/wrapper/` chooses one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ares_exp.environment import EnvironmentWrapper, MinimalEnvironment, PendingRequest, TimeStep
from ares_exp.wrappers.async_gym import AsyncGymWrapper

if TYPE_CHECKING:
    from ares_exp.wrappers.gym_in_thread import GymInThread


class GymDriver(EnvironmentWrapper):
    """Plays through a Gymnasium face, and gives the environment's own time steps back."""

    def __init__(self, gym: AsyncGymWrapper | GymInThread) -> None:
        """Takes over `gym`: the driver closes it."""
        super().__init__(gym.environment)
        self._gym = gym

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode and returns its FIRST step."""
        _, info = await self._gym.reset(seed=seed, options=options)
        return info["time_step"]  # type: ignore[no-any-return]

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action` and returns the next step."""
        return (await self._gym.step(action))[4]["time_step"]  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Closes the environment."""
        await self._gym.close()

    async def __aenter__(self) -> Self:
        """Enters the environment."""
        await self._gym.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the environment, which learns why; that closes it."""
        await self._gym.__aexit__(exc_type, exc, traceback)


class ThreadedGymDriver(GymDriver):
    """Plays through a face whose environment is on another event loop, where alone its requests can be looked at."""

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns none: the policy is asked for one answer after the other."""
        return ()

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Never returns: see `pending_requests`."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable: nobody sets the event")


def drive_async_gym(environment: MinimalEnvironment) -> GymDriver:
    """Drives the environment through `AsyncGymWrapper` on the caller's event loop. Does not import gymnasium."""
    return GymDriver(AsyncGymWrapper(environment))


def drive_sync_gym(environment: MinimalEnvironment) -> GymDriver:
    """Drives the environment through `GymWrapper`, called from the driver's own thread, for `wrapper=sync`.

    The environment then runs on the wrapper's event loop, not on the caller's: what it shares with other environments
    must not be bound to a loop.
    """
    from ares_exp.wrappers.gym_in_thread import GymInThread
    from ares_exp.wrappers.sync_gym import GymWrapper

    return ThreadedGymDriver(GymInThread(GymWrapper(environment)))
