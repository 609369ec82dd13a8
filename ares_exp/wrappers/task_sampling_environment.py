"""The environment of a preset. At each `reset()`, it chooses a task from an `EnvironmentSource`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ares_exp.cancellation import finish
from ares_exp.environment import (
    EnvironmentBase,
    EnvironmentWrapper,
    EpisodeReport,
    LimitName,
    OneCallAtATime,
    TimeStep,
    complete,
    no_episode,
)
from ares_exp.environments.episode_limits import limited
from ares_exp.environments.source import EnvironmentSource, EpisodeParts, as_source, choose_index
from ares_exp.errors import ConfigError, EpisodeStateError
from ares_exp.runs.scheduler import episode_seed

logger = logging.getLogger(__name__)


class TaskSamplingEnvironment(EnvironmentWrapper):
    """Runs tasks of a source. For each episode, the source creates a new environment.

    The first `reset()` checks that the container backend works and can run the tasks.

    Attributes:
        task_names: Names of the tasks from which `reset()` chooses.
        attempt: Number of the current attempt at the task, starting at 0. `reset(seed=…)` resets the numbers of all
            tasks.
        episode_seed: Seed of the episode. A run with the same `seed` uses the same value for the same attempt at the
            task.
    """

    def __init__(self, source: EnvironmentSource, task_names: Sequence[str], parts: EpisodeParts) -> None:
        """Creates the environment, without starting anything.

        Args:
            source: Source that has loaded its tasks. This environment closes it.
            task_names: Names of the tasks from which `reset()` chooses.
            parts: Containers, agent and limits of the episodes. `parts.seed` is the seed for the choice of tasks.

        Raises:
            ConfigError: `task_names` is empty.
        """
        if not task_names:
            raise ConfigError("Expected at least one task for the environment, got none.")
        super().__init__(_NotReset())
        self.task_names = tuple(task_names)
        self.attempt = 0
        self.episode_seed = 0
        self._source = as_source(source)
        self._parts = parts
        self._task_name: str | None = None
        self._checked = False
        self._closed = 0
        self._calls = OneCallAtATime()
        self._reseed(parts.seed)

    @property
    def current_task(self) -> Any:
        """The task of the episode, or only its name if the environment has no task object; `None` before `reset()`."""
        return super().current_task or self._task_name

    def report(self) -> EpisodeReport:
        """Returns the report of the episode's environment, and adds the task, the attempt and the seed."""
        report = super().report()
        if self._task_name is None:
            return report
        name = report.task_name or self._task_name
        return replace(report, task_name=name, seed=self.episode_seed, attempt=self.attempt)

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode. If an episode is running, abandons it.

        Args:
            seed: New seed for choosing tasks and for seeding episodes.
            options: `{"task": name_or_index}` selects the task.

        Raises:
            UserError: The container backend does not work or cannot run the tasks, or the task does not exist.
            EpisodeError: The episode could not start. All of its resources were released.
        """
        with self._calls.during("reset()"):
            closed = self._closed
            await self._check()
            await self._env.close()
            if closed != self._closed:
                raise EpisodeStateError("The environment was closed while reset() was running.")
            self._env = complete(_NotReset())
            self._task_name = None
            if seed is not None:
                self._reseed(seed)
            name = self.task_names[choose_index(self.task_names, options or {}, self._random)]
            self.attempt, self._ran[name] = self._ran[name], self._ran[name] + 1
            self.episode_seed = episode_seed(self._seed, name, self.attempt)
            self._task_name = name
            parts = replace(self._parts, seed=self.episode_seed)
            self._env = limited(self._source.make(name, parts), parts.limits)
            try:
                return await self._env.reset()
            except BaseException:
                await finish(self._env.close())
                raise

    async def step(self, action: Any) -> TimeStep[Any]:
        """Steps the episode's environment. Raises its errors, or `EpisodeStateError` before `reset()`."""
        with self._calls.during("step()"):
            return await self._env.step(action)

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Ends the episode because of `limit`. Returns `None` if the episode's environment does not support this."""
        with self._calls.during("truncate()"):
            return await super().truncate(limit)

    async def close(self) -> None:
        """Closes the environment of the episode and the source of the tasks. Idempotent."""
        self._closed += 1
        try:
            await self._env.close()
        finally:
            await self._source.close()

    __aenter__ = EnvironmentBase.__aenter__
    __aexit__ = EnvironmentBase.__aexit__

    def _reseed(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._ran: Counter[str] = Counter()

    async def _check(self) -> None:
        """Checks that the task source, the containers and the agent work. Does nothing after the first success."""
        if self._checked:
            return
        await self._source.preflight()
        if self._source.needs_container:
            await self._parts.container_factory.preflight()
            await self._parts.code_agent_factory.preflight()
        await asyncio.to_thread(self._source.check, self._parts, report=logger.warning)
        self._checked = True


class _NotReset:
    async def reset(self) -> TimeStep[Any]:
        raise no_episode(ended=False)

    async def step(self, action: Any) -> TimeStep[Any]:
        raise no_episode(ended=False)

    async def close(self) -> None:
        """Does nothing, because the placeholder has no resources."""
