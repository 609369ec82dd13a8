"""Environments that a function makes, as a source with one task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ares_exp.config.parts import name_of
from ares_exp.environment import EnvironmentWrapper, MinimalEnvironment, TimeStep, takes_seed
from ares_exp.environments.source import EpisodeParts, Report, SourceBase


class MadeEnvironments(SourceBase):
    """The source of a function without arguments; its task has the function's name."""

    path = None
    needs_container = False

    def __init__(self, make: Callable[[], MinimalEnvironment]) -> None:
        """Keeps the function."""
        self._make = make

    def load(self, report: Report) -> Sequence[str]:
        """Returns the one name."""
        name = name_of(self._make)
        return ["environment" if name == "<lambda>" else name]

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Refuses nothing: the function alone knows what it makes."""

    def make(self, task_name: str, parts: EpisodeParts) -> EnvironmentWrapper:
        """Calls the function. Raises `TypeError` when it makes something that is no environment."""
        made = self._make()
        if not isinstance(made, MinimalEnvironment):
            raise TypeError(
                f"Expected {name_of(self._make)}() to make an environment with `reset`, `step` and `close`, got "
                f"{type(made).__name__}."
            )
        return _Seeded(made, parts.seed)


class _Seeded(EnvironmentWrapper):
    """Gives the episode's seed to the first `reset`, of an environment that takes one."""

    def __init__(self, env: MinimalEnvironment, seed: int) -> None:
        super().__init__(env)
        self._seed = seed if takes_seed(env) else None

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode."""
        first, self._seed = self._seed, None
        return await super().reset(seed=first if seed is None else seed, options=options)
