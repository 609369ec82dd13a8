"""`AsyncGymWrapper`, which gives an environment Gymnasium's methods, as coroutines.

`GymWrapper` runs these coroutines for callers that are not asynchronous. Gymnasium is imported only on the first access
to a space.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

from ares_exp.environment import EnvironmentWrapper, MinimalEnvironment, TimeStep, complete
from ares_exp.llms.request import LLMRequest
from ares_exp.records.results import EpisodeUsage
from ares_exp.trajectories.records import ending
from ares_exp.wrappers.chat_text import Exchange

if TYPE_CHECKING:
    from ares_exp.wrappers.spaces import LLMRequestSpace, LLMResponseSpace
    from ares_exp.wrappers.sync_gym import GymWrapper


class UsageInfo(TypedDict):
    """Tokens and cost (US dollars) of all actions since `reset`. Unreported token counts are 0."""

    prompt_tokens: int
    generated_tokens: int
    cost: float


class EpisodeInfo(TypedDict):
    """The `info` that `reset` and `step` return. It always has all keys, so that vector environments can stack it.

    Attributes:
        time_step: The environment's own `TimeStep`.
        task: Name of the task; `None` if the environment has no tasks.
        step: Number of actions since `reset`: 0 after `reset`.
        usage: Tokens and cost of these actions.
        outcome: After the last step: `"completed"`, `"truncated"`, or `"errored"` (the reward is not finite), as in the
            rows of a run. Before the last step: `None`.
        limit: Limit that truncated the episode (`"steps"`, `"time"`, `"tokens"`, `"cost"`, …); `"unknown"` if the
            environment does not report the limit; `None` if the episode was not truncated.
        rewards: All rewards from the verifier, by key; empty before the last step, or if the environment has no
            verifier.
    """

    time_step: Any
    task: str | None
    step: int
    usage: UsageInfo
    outcome: str | None
    limit: str | None
    rewards: dict[str, float]


NO_REQUEST = LLMRequest(messages=())
"""Observation after the end of an episode. Gymnasium requires a member of the space, although there is no request."""

RENDER_MODES = ("ansi",)

GymStep: TypeAlias = tuple[Any, float, bool, bool, EpisodeInfo]


class AsyncGymWrapper:
    """Gives an environment Gymnasium's methods, as coroutines. `async with` closes the environment at the end.

    Attributes:
        environment: The wrapped environment.
    """

    def __init__(self, env: MinimalEnvironment, *, render_mode: str | None = None) -> None:
        """Wraps `env`. Closing the wrapper closes `env`.

        Args:
            env: The environment.
            render_mode: With `"ansi"`, `render` returns the last response and the next observation as text. With
                `None`, it returns `None`.

        Raises:
            ValueError: The render mode is unknown.
        """
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise ValueError(
                f"Expected render_mode to be 'ansi' or None, got {render_mode!r}: chats can only be rendered as text."
            )
        self.environment = env
        self._env = complete(env)
        self._task: str | None = None
        self._usage = EpisodeUsage()
        self.render_mode = render_mode
        self._last_exchange: Exchange | None = None

    @cached_property
    def observation_space(self) -> LLMRequestSpace:
        """Space of all LLM requests."""
        from ares_exp.wrappers.spaces import LLMRequestSpace

        return LLMRequestSpace()

    @cached_property
    def action_space(self) -> LLMResponseSpace:
        """Space of all LLM responses."""
        from ares_exp.wrappers.spaces import LLMResponseSpace

        return LLMResponseSpace()

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, EpisodeInfo]:
        """Starts an episode.

        Args:
            seed: Seed for the environment's choice of tasks; `None` keeps the current seed. If the environment's
                `reset()` does not accept a seed, the seed is ignored with one log message.
            options: Options for the environment's `reset()`, for example `{"task": name_or_index}`.

        Returns:
            The first observation, and the `info` (see `EpisodeInfo`).

        Raises:
            TypeError: `options` is not empty, and the environment's `reset()` does not take options.
        """
        self._last_exchange = None
        time_step = await self._env.reset(seed=seed, options=options)
        self._task, self._usage = self._env.report().task_name, EpisodeUsage()
        observation = to_gym(time_step)[0]
        self._last_exchange = Exchange(None, observation)
        return observation, self._info(time_step)

    async def step(self, action: Any) -> GymStep:
        """Applies `action`, usually an `LLMResponse`. Returns the four values of `to_gym`, and the `info`."""
        time_step = await self._env.step(action)
        self._usage.add(action)
        observation, reward, terminated, truncated = to_gym(time_step)
        self._last_exchange = Exchange(action, observation, reward, terminated, truncated)
        return observation, reward, terminated, truncated, self._info(time_step)

    def _info(self, time_step: Any) -> EpisodeInfo:
        """Creates the `info` for the time step that the environment has just returned."""
        usage = self._usage
        info: EpisodeInfo = {
            "time_step": time_step,
            "task": self._task,
            "step": usage.step_count,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "generated_tokens": usage.generated_tokens,
                "cost": usage.cost,
            },
            "outcome": None,
            "limit": None,
            "rewards": {},
        }
        if time_step.step_type == "LAST":
            report = self._env.report()
            ended = ending(time_step, limit=report.truncated_by, note=report.limit_note)
            info["outcome"] = ended.outcome.value
            info["limit"] = ended.error.limit if ended.error is not None else None
            info["rewards"] = {key: float(value) for key, value in report.rewards.items()}
        return info

    async def render(self) -> str | None:
        """Returns the last response and the next observation as text if `render_mode` is `"ansi"`, otherwise `None`."""
        return self.rendering()

    def rendering(self) -> str | None:
        """Returns the same as `render`, but is not a coroutine, so that synchronous code can call it.

        Before the first `reset`, the text is empty. After `reset`, it contains the first observation. After `step`, it
        contains the response, the next observation and, if the episode has ended, the reward.
        """
        if self.render_mode is None:
            return None
        return "" if self._last_exchange is None else str(self._last_exchange)

    async def close(self) -> None:
        """Closes the wrapped environment."""
        await self._env.close()

    async def __aenter__(self) -> AsyncGymWrapper:
        await self._env.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the wrapped environment by calling its `__aexit__` with the exception, if any."""
        await self._env.__aexit__(exc_type, exc, traceback)


def to_gym(time_step: TimeStep[Any]) -> tuple[Any, float, bool, bool]:
    """Converts a time step, or any object with the same four fields, to the first four results of Gymnasium's `step`.

    Returns:
        observation: Observation of the time step; `NO_REQUEST` if it has none, because the episode has ended.
        reward: Reward of the time step; 0.0 if it has none.
        terminated: Whether the episode ended by itself (LAST with discount 0).
        truncated: Whether a limit ended the episode (LAST with a discount above 0).

    Raises:
        ValueError: The time step is invalid: its step type is unknown, or a LAST step has no discount.
    """
    step_type, discount = time_step.step_type, time_step.discount
    terminated = truncated = False
    if step_type == "LAST":
        if discount is None:
            raise ValueError(
                "Expected the LAST time step to have a discount (0 terminated, above 0 truncated), got None."
            )
        terminated = bool(discount == 0)
        truncated = not terminated
    elif step_type not in ("FIRST", "MID"):
        raise ValueError(f"Expected a time step with step_type FIRST, MID or LAST, got {step_type!r}.")
    observation = NO_REQUEST if time_step.observation is None else time_step.observation
    reward = 0.0 if time_step.reward is None else float(time_step.reward)
    return observation, reward, terminated, truncated


@overload
def wrap_as_gym(
    env: MinimalEnvironment,
    *,
    async_mode: Literal[False] = False,
    render_mode: str | None = None,
    allow_running_loop: bool = False,
) -> GymWrapper: ...


@overload
def wrap_as_gym(
    env: MinimalEnvironment, *, async_mode: Literal[True], render_mode: str | None = None
) -> AsyncGymWrapper: ...


def wrap_as_gym(
    env: MinimalEnvironment,
    *,
    async_mode: bool = False,
    render_mode: str | None = None,
    allow_running_loop: bool = False,
) -> GymWrapper | AsyncGymWrapper:
    """Wraps an environment in an object with Gymnasium's interface.

    Args:
        env: The environment. The wrapper owns it, so closing the wrapper also closes the environment.
        async_mode: Whether the methods are asynchronous (`AsyncGymWrapper`) or block (`GymWrapper`).
        render_mode: With `"ansi"`, `render()` returns the last response and the next observation as text.
        allow_running_loop: Whether calls to a `GymWrapper` may block a running event loop. Set it in notebooks.

    Returns:
        The wrapper. Both classes are context managers.

    Raises:
        ValueError: `allow_running_loop` is set together with `async_mode`, or the render mode is unknown.
    """
    if async_mode and allow_running_loop:
        raise ValueError("`allow_running_loop` requires `async_mode=False`. An AsyncGymWrapper never blocks a loop.")
    if async_mode:
        return AsyncGymWrapper(env, render_mode=render_mode)
    from ares_exp.wrappers.sync_gym import GymWrapper

    return GymWrapper(env, render_mode=render_mode, allow_running_loop=allow_running_loop)


class GymDriver(EnvironmentWrapper):
    """Makes an `AsyncGymWrapper` usable like any other environment. A run uses it for `wrapper=async`.

    `reset` and `step` pass through the wrapper, but return the time steps of the environment.
    """

    def __init__(self, gym: AsyncGymWrapper) -> None:
        super().__init__(gym.environment)
        self._gym = gym

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode and returns its FIRST step."""
        _, info = await self._gym.reset(seed=seed, options=options)
        return info["time_step"]  # type: ignore[no-any-return]

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action` and returns the next time step."""
        return (await self._gym.step(action))[4]["time_step"]  # type: ignore[no-any-return]


def drive_async_gym(environment: MinimalEnvironment) -> GymDriver:
    """Creates a driver that runs the environment through `AsyncGymWrapper`. The option `wrapper=async` uses it."""
    return GymDriver(AsyncGymWrapper(environment))
