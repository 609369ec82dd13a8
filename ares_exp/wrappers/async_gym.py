"""`AsyncGymWrapper`: Gymnasium's `reset` and `step` for an asynchronous environment, to be awaited.

Everything that the Gymnasium face means is decided here; `GymWrapper` runs the same coroutines for callers that are
not asynchronous. This module does not import gymnasium: only the two spaces do, when they are first asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from ares_exp.environments.environment import Environment
from ares_exp.environments.time_step import TimeStep
from ares_exp.llms.request import LLMRequest
from ares_exp.wrappers.chat_text import Exchange

if TYPE_CHECKING:
    from ares_exp.wrappers.spaces import LLMRequestSpace, LLMResponseSpace

NO_REQUEST = LLMRequest(messages=())
"""The observation of an ended episode. Gymnasium wants one that is in the space, and no request is pending any more."""

RENDER_MODES = ("ansi",)

Info: TypeAlias = dict[str, Any]
GymStep: TypeAlias = tuple[Any, float, bool, bool, Info]


class AsyncGymWrapper:
    """Shows an environment as Gymnasium does, with methods to be awaited. `async with` closes the environment."""

    def __init__(self, env: Environment, *, render_mode: str | None = None) -> None:
        """Wraps `env`, which the wrapper then owns.

        Args:
            env: The environment.
            render_mode: `"ansi"`: `render` gives the last exchange as text. `None`: it gives nothing.

        Raises:
            ValueError: There is no such render mode.
        """
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise ValueError(f"Expected render_mode to be 'ansi' or None, got {render_mode!r}: a chat has no pixels.")
        self._env = env
        self.render_mode = render_mode
        self._last_exchange: Exchange | None = None

    @property
    def environment(self) -> Environment:
        """The wrapped environment."""
        return self._env

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

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        """Starts an episode.

        Args:
            seed: Seeds the environment's choice of tasks; `None` leaves it as it is.
            options: For example `{"task": name_or_index}`. An empty mapping asks for nothing.

        Returns:
            The first observation, and `{"time_step": …}` with the environment's own time step.

        Raises:
            TypeError: The environment's `reset()` does not take what was given.
        """
        arguments = _reset_arguments(self._env.reset, seed, options)
        self._last_exchange = None
        observation, _, _, _, info = to_gym(await self._env.reset(**arguments))
        self._last_exchange = Exchange(None, observation)
        return observation, info

    async def step(self, action: Any) -> GymStep:
        """Applies `action`, usually an `LLMResponse`; for what comes back see `to_gym`."""
        result = observation, reward, terminated, truncated, _ = to_gym(await self._env.step(action))
        self._last_exchange = Exchange(action, observation, reward, terminated, truncated)
        return result

    async def render(self) -> str | None:
        """The last exchange as text with `render_mode="ansi"`, else `None`."""
        return self.rendering()

    def rendering(self) -> str | None:
        """What `render` returns, without awaiting.

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


def to_gym(time_step: TimeStep[Any]) -> GymStep:
    """Turns a time step, or anything with the same four fields, into what Gymnasium's `step` returns.

    Returns:
        observation: The time step's own; `NO_REQUEST` where it has none, which is so when the episode has ended.
        reward: 0.0 where the time step has none.
        terminated: Whether the episode came to its own end (LAST with discount 0).
        truncated: Whether a limit cut it short (LAST with a discount above 0).
        info: `{"time_step": time_step}`.

    Raises:
        ValueError: The time step breaks the contract: an unknown step type, or LAST without a discount.
    """
    step_type, discount = time_step.step_type, time_step.discount
    if step_type not in ("FIRST", "MID", "LAST"):
        raise ValueError(f"Expected a time step with step_type FIRST, MID or LAST, got {step_type!r}.")
    last = step_type == "LAST"
    if last and discount is None:
        raise ValueError("Expected the LAST time step to have a discount (0 terminated, above 0 truncated), got None.")
    terminated = last and discount == 0
    observation = NO_REQUEST if time_step.observation is None else time_step.observation
    reward = 0.0 if time_step.reward is None else float(time_step.reward)
    return observation, reward, terminated, last and not terminated, {"time_step": time_step}


def _reset_arguments(
    reset: Callable[..., Any], seed: int | None, options: Mapping[str, Any] | None
) -> dict[str, int | Mapping[str, Any]]:
    """What of `seed` and `options` was given, checked against the signature of the environment's `reset`."""
    given: dict[str, int | Mapping[str, Any]] = {}
    if seed is not None:
        given["seed"] = seed
    if options:
        given["options"] = options
    missing = [name for name in given if not _takes(reset, name)]
    if missing:
        name = getattr(reset, "__qualname__", repr(reset))
        raise TypeError(
            f"Expected an environment that can be reset with {' and '.join(missing)}, but {name}() does not take "
            f"{'it' if len(missing) == 1 else 'them'}. Call reset() without, or give the environment's reset() "
            f"the keyword arguments `seed=None, options=None`."
        )
    return given


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
