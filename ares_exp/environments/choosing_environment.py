"""The choosing environment: one that plays the tasks of any `EnvironmentSource`, chosen at `reset()`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from ares_exp.containers.cancellation import finish
from ares_exp.environments.environment import Environment
from ares_exp.environments.source import EnvironmentSource, EpisodeParts
from ares_exp.environments.task_choice import choose_index
from ares_exp.environments.time_step import TimeStep
from ares_exp.episode_plan import episode_seed
from ares_exp.errors import ConfigError, EpisodeStateError

logger = logging.getLogger(__name__)


class ChoosingEnvironment:
    """Plays tasks of a source, each episode in an environment that the source makes for it.

    What that environment has besides (`export_state`, `fork`, `current_task`, …) this one has, too, from the first
    `reset()` on. That first `reset()` checks that the container backend works and can play the tasks.

    Attributes:
        task_names: What `reset()` chooses from.
        attempt: Number of this playing of the task since the choice was seeded, from 0.
        episode_seed: Seed of the episode, as a run with `seed=…` gives it to that attempt.
    """

    def __init__(self, source: EnvironmentSource, task_names: Sequence[str], parts: EpisodeParts) -> None:
        """Touches nothing.

        Args:
            source: Makes the environments; its tasks are loaded. It is this environment's to close.
            task_names: The tasks, of those that are loaded.
            parts: What the environments are made from. Its seed seeds the choice of tasks.
        """
        if not task_names:
            raise ConfigError("Expected at least one task for the environment, got none.")
        self.task_names = tuple(task_names)
        self.attempt = 0
        self.episode_seed = 0
        self._source = source
        self._parts = parts
        self._environment: Environment | None = None
        self._task_name: str | None = None
        self._checked = False
        self._closed = 0
        self._busy = ""
        self._reseed(parts.seed)

    def __getattr__(self, name: str) -> Any:
        """Public attributes of the environment of the episode."""
        if name.startswith("_"):
            raise AttributeError(name)
        if self._environment is None:
            raise AttributeError(f"The environment has no {name!r} before the first reset().")
        return getattr(self._environment, name)

    @property
    def current_task(self) -> Any:
        """The task of the episode as its environment gives it, or its name; `None` before the first `reset()`."""
        return getattr(self._environment, "current_task", None) or self._task_name

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode; one under way is abandoned.

        Args:
            seed: Reseeds the choice of tasks, and with it the episodes.
            options: `{"task": name_or_index}` picks the task.

        Raises:
            UserError: The container backend does not work, or cannot play the tasks; or there is no such task.
            EpisodeError: As the class says; nothing is left running.
        """
        with self._one_call_at_a_time("reset()"):
            closed = self._closed
            await self._check()
            await self._close_episode()
            if closed != self._closed:
                raise EpisodeStateError("The environment was closed while reset() was under way.")
            self._environment = self._task_name = None
            if seed is not None:
                self._reseed(seed)
            name = self.task_names[choose_index(self.task_names, options or {}, self._random)]
            self.attempt, self._played[name] = self._played[name], self._played[name] + 1
            self.episode_seed = episode_seed(self._seed, name, self.attempt)
            self._task_name = name
            self._environment = self._source.make(name, replace(self._parts, seed=self.episode_seed))
            try:
                return await self._environment.reset()
            except BaseException:
                await finish(self._environment.close())
                raise

    async def step(self, action: Any) -> TimeStep[Any]:
        """Steps the episode. Raises `EpisodeStateError` before `reset()`, and what its environment raises."""
        with self._one_call_at_a_time("step()"):
            if self._environment is None:
                raise EpisodeStateError("step() on an environment that has not been reset: call reset() first.")
            return await self._environment.step(action)

    async def close(self) -> None:
        """Closes the episode and the source. Idempotent."""
        self._closed += 1
        try:
            await self._close_episode()
        finally:
            if (close := getattr(self._source, "close", None)) is not None:
                await close()

    async def __aenter__(self) -> Self:
        """Returns the environment itself."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment."""
        await self.close()

    def _reseed(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._played: Counter[str] = Counter()

    async def _check(self) -> None:
        """What a run checks before it starts, once."""
        if self._checked:
            return
        checked: list[object] = [self._source]
        if getattr(self._source, "needs_container", True):
            checked += [self._parts.container_factory, self._parts.code_agent_factory]
        for part in checked:
            if (preflight := getattr(part, "preflight", None)) is not None:
                await preflight()
        await asyncio.to_thread(self._source.check, self._parts, report=logger.warning)
        self._checked = True

    async def _close_episode(self) -> None:
        if self._environment is not None:
            await self._environment.close()

    @contextmanager
    def _one_call_at_a_time(self, what: str) -> Iterator[None]:
        if self._busy:
            raise EpisodeStateError(f"{what} while {self._busy} is under way: await that one first.")
        self._busy = what
        try:
            yield
        finally:
            self._busy = ""
