"""Drivers: how the runner plays an environment. Directly, or through one of its Gymnasium faces.

A driver is an environment again (`reset`, `step`, `close`, `async with`), so the rollout loop is the same for all
three, and so are the time steps, the exceptions and what cancelling a call does. `conf/wrapper/` chooses one.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ares_exp.environments.environment import Environment
from ares_exp.environments.time_step import TimeStep
from ares_exp.wrappers.async_gym import AsyncGymWrapper, GymStep, Info

if TYPE_CHECKING:
    from ares_exp.wrappers.gym_in_thread import GymInThread


class AwaitableGym(Protocol):
    """A Gymnasium face whose methods are awaited."""

    async def reset(self) -> tuple[Any, Info]:
        """Starts an episode: observation and info."""
        ...

    async def step(self, action: Any) -> GymStep:
        """Applies `action`: observation, reward, terminated, truncated, info."""
        ...

    async def close(self) -> None:
        """Closes the environment behind it."""
        ...

    async def __aenter__(self) -> Any:
        """Enters the environment behind it."""
        ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the environment behind it."""
        ...


class GymDriver:
    """Plays through a Gymnasium face and gives the time steps back, after holding the one against the other."""

    def __init__(self, gym: AwaitableGym) -> None:
        """Drives `gym`, which the driver then owns."""
        self._gym = gym

    async def reset(self) -> TimeStep[Any]:
        """Starts an episode and returns its FIRST step."""
        _, info = await self._gym.reset()
        return _time_step(info)

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action` and returns the next step.

        Raises:
            RuntimeError: What Gymnasium says about the end of the episode is not what the time step says.
        """
        _, _, terminated, truncated, info = await self._gym.step(action)
        time_step = _time_step(info)
        ended = time_step.step_type == "LAST"
        expected = (ended and not time_step.discount, ended and bool(time_step.discount))
        if (terminated, truncated) != expected:
            raise RuntimeError(
                f"Expected (terminated, truncated) = {expected} for a {time_step.step_type} step with discount "
                f"{time_step.discount}, got {(terminated, truncated)}. A wrapper changed one of the two only."
            )
        return time_step

    async def close(self) -> None:
        """Closes the environment."""
        await self._gym.close()

    async def __aenter__(self) -> GymDriver:
        """Enters the environment."""
        await self._gym.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the environment, which learns why; that closes it."""
        await self._gym.__aexit__(exc_type, exc, traceback)


def drive_directly(environment: Environment) -> Environment:
    """`wrapper=none`: the environment itself."""
    return environment


def drive_async_gym(environment: Environment) -> GymDriver:
    """`wrapper=async`: through `AsyncGymWrapper`, on the caller's event loop. Does not import gymnasium."""
    return GymDriver(AsyncGymWrapper(environment))


def drive_sync_gym(environment: Environment) -> GymDriver:
    """`wrapper=sync`: through `GymWrapper`, called from a thread of the driver's own.

    The environment then runs on the wrapper's event loop, not on the caller's: what it shares with other environments
    must not be bound to a loop.
    """
    return GymDriver(_gym_in_thread(environment))


def _gym_in_thread(environment: Environment) -> GymInThread:
    from ares_exp.wrappers.gym import GymWrapper
    from ares_exp.wrappers.gym_in_thread import GymInThread

    return GymInThread(GymWrapper(environment))


def _time_step(info: Info) -> TimeStep[Any]:
    time_step: TimeStep[Any] = info["time_step"]
    return time_step
