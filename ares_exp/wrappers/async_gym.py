"""`AsyncGymWrapper`: Gymnasium's `reset` and `step` for an asynchronous environment, to be awaited.

Everything that the Gymnasium face means is decided here; `GymWrapper` runs the same coroutines for callers that are
not asynchronous. This module does not import gymnasium: only the two spaces do, when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from ares_exp.environment import MinimalEnvironment, TimeStep, complete
from ares_exp.llms.request import LLMRequest
from ares_exp.records.results import EpisodeUsage
from ares_exp.wrappers.chat_text import Exchange
from ares_exp.wrappers.episode_info import EpisodeInfo, info_of

if TYPE_CHECKING:
    from ares_exp.wrappers.spaces import LLMRequestSpace, LLMResponseSpace

NO_REQUEST = LLMRequest(messages=())
"""The observation of an ended episode: no request is pending, but Gymnasium requires a member of the space."""

RENDER_MODES = ("ansi",)

GymStep: TypeAlias = tuple[Any, float, bool, bool, EpisodeInfo]


class AsyncGymWrapper:
    """Shows an environment as Gymnasium does, with methods to be awaited. `async with` closes the environment.

    Attributes:
        environment: The wrapped environment.
    """

    def __init__(self, env: MinimalEnvironment, *, render_mode: str | None = None) -> None:
        """Wraps `env`, which the wrapper then owns.

        Args:
            env: The environment.
            render_mode: `"ansi"`: `render` gives the last exchange as text. `None`: it gives nothing.

        Raises:
            ValueError: There is no such render mode.
        """
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise ValueError(f"Expected render_mode to be 'ansi' or None, got {render_mode!r}: a chat has no pixels.")
        self.environment = env
        self._env = complete(env)
        self._task: str | None = None
        self._usage = EpisodeUsage()
        self.render_mode = render_mode
        self._last_exchange: Exchange | None = None

    @cached_property
    def observation_space(self) -> LLMRequestSpace:
        """All LLM requests."""
        from ares_exp.wrappers.spaces import LLMRequestSpace

        return LLMRequestSpace()

    @cached_property
    def action_space(self) -> LLMResponseSpace:
        """All LLM responses."""
        from ares_exp.wrappers.spaces import LLMResponseSpace

        return LLMResponseSpace()

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, EpisodeInfo]:
        """Starts an episode.

        Args:
            seed: Seeds the environment's choice of tasks; `None` leaves it unchanged. If the environment's `reset()`
                takes no seed, it is called without; that is logged once.
            options: For example `{"task": name_or_index}`. An empty mapping is ignored.

        Returns:
            The first observation, and the `EpisodeInfo`.

        Raises:
            TypeError: There are options, and the environment's `reset()` takes none.
        """
        self._last_exchange = None
        time_step = await self._env.reset(seed=seed, options=options)
        self._task, self._usage = self._env.report().task_name, EpisodeUsage()
        observation = to_gym(time_step)[0]
        if self.render_mode is not None:
            self._last_exchange = Exchange(None, observation)
        return observation, info_of(time_step, self._env, self._task, self._usage)

    async def step(self, action: Any) -> GymStep:
        """Applies `action`, usually an `LLMResponse`; for what comes back see `to_gym` and `EpisodeInfo`."""
        time_step = await self._env.step(action)
        self._usage.add(action)
        observation, reward, terminated, truncated = to_gym(time_step)
        if self.render_mode is not None:
            self._last_exchange = Exchange(action, observation, reward, terminated, truncated)
        info = info_of(time_step, self._env, self._task, self._usage)
        return observation, reward, terminated, truncated, info

    async def render(self) -> str | None:
        """Returns the last exchange as text with `render_mode="ansi"`, else `None`."""
        return self.rendering()

    def rendering(self) -> str | None:
        """Returns what `render` returns, without awaiting.

        After `reset` that is what the policy sees first; after `step` its answer, what came of it and, when the episode
        has ended, the reward; before either an empty text.
        """
        if self.render_mode is None:
            return None
        return "" if self._last_exchange is None else str(self._last_exchange)

    async def close(self) -> None:
        """Closes the wrapped environment."""
        await self._env.close()

    async def __aenter__(self) -> AsyncGymWrapper:
        """Enters the wrapped environment."""
        await self._env.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the wrapped environment, which learns why; that closes it."""
        await self._env.__aexit__(exc_type, exc, traceback)


def to_gym(time_step: TimeStep[Any]) -> tuple[Any, float, bool, bool]:
    """Turns a time step, or anything with the same four fields, into what Gymnasium's `step` returns before `info`.

    Returns:
        observation: The time step's own; `NO_REQUEST` where it has none, which is so when the episode has ended.
        reward: 0.0 where the time step has none.
        terminated: Whether the episode ended by itself (LAST with discount 0).
        truncated: Whether a limit cut it short (LAST with a discount above 0).

    Raises:
        ValueError: The time step breaks the contract: an unknown step type, or LAST without a discount.
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
