"""`wrap_as_gym`: the one function for both wrappers. Importing it does not import gymnasium."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from ares_exp.environment import MinimalEnvironment
from ares_exp.wrappers.async_gym import AsyncGymWrapper

if TYPE_CHECKING:
    from ares_exp.wrappers.sync_gym import GymWrapper


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
    """Shows an environment as Gymnasium.

    Args:
        env: The environment, which the wrapper then owns: closing the wrapper closes it.
        async_mode: Whether the methods are to be awaited (`AsyncGymWrapper`) or block (`GymWrapper`).
        render_mode: `"ansi"` for a `render()` that gives the last exchange as text.
        allow_running_loop: Only for `GymWrapper`: whether its calls may block a running event loop, as in a notebook.

    Returns:
        The wrapper; both are context managers.

    Raises:
        ValueError: `allow_running_loop` together with `async_mode`; no such render mode.
    """
    if async_mode and allow_running_loop:
        raise ValueError("`allow_running_loop` is for `async_mode=False`: an AsyncGymWrapper never blocks a loop.")
    if async_mode:
        return AsyncGymWrapper(env, render_mode=render_mode)
    from ares_exp.wrappers.sync_gym import GymWrapper

    return GymWrapper(env, render_mode=render_mode, allow_running_loop=allow_running_loop)
