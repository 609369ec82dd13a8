"""The limited environment: any environment, ended when it reaches a limit of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ares_exp.environment import (
    EnvironmentBase,
    EnvironmentWrapper,
    EpisodeReport,
    LimitName,
    MinimalEnvironment,
    TimeStep,
    complete,
    no_episode,
)
from ares_exp.environments.deadline import Deadline, DeadlinePassedError
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.records.results import EpisodeUsage

GIVEN_UP = "{} has no `truncate(limit)`, which would score what there was, so it was closed without a reward"
"""Why an episode has no reward that a limit of the run has ended."""


def limited(env: MinimalEnvironment, limits: EpisodeLimits, used: EpisodeUsage | None = None) -> EnvironmentBase:
    """Returns an environment that ends its episodes at `limits`: `env` itself if it does so, otherwise around it.

    Args:
        env: The environment.
        limits: The limits of each of its episodes.
        used: What the first episode has used before its `reset()`, which continues it.
    """
    whole = complete(env)
    return whole if whole.keeps(limits) else LimitedEnvironment(whole, limits, used=used)


class LimitedEnvironment(EnvironmentWrapper):
    """Wraps an environment that does not know the limits of the run, and ends its episodes at them.

    After a step that reaches a limit and does not end the episode, the environment is asked to end it (`truncate`),
    and scores its state. An environment that cannot is closed, and its episode gets a LAST with discount 1.0, the
    pending observation and reward `None`. Finishing on the very step that also reaches a limit stays termination.

    The time limit is the run's own on the agent (`limits.time`). An environment that `is_timed` keeps it by itself;
    another one is closed when its time is up in the middle of a step.
    """

    def __init__(self, env: MinimalEnvironment, limits: EpisodeLimits, *, used: EpisodeUsage | None = None) -> None:
        """Limits `env`.

        Args:
            env: The environment.
            limits: What each of its episodes may use.
            used: What the first episode has used before its `reset()`, which continues it.
        """
        super().__init__(env)
        self._limits = limits
        self._used = used
        self._usage = EpisodeUsage()
        self._keeps_time = False
        self._deadline = Deadline(None)
        self._pending: TimeStep[Any] | None = None
        self._last: TimeStep[Any] | None = None
        self._truncated_by: LimitName | None = None
        self._is_given_up = False

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode, whose time runs from its first observation."""
        self._usage, self._used = replace(self._used) if self._used is not None else EpisodeUsage(), None
        self._pending = self._last = self._truncated_by = None
        self._is_given_up = False
        self._pending = await super().reset(seed=seed, options=options)
        self._keeps_time = not super().is_timed
        self._deadline = Deadline(self._limits.time.agent(None) if self._keeps_time else None)
        return self._pending

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action`, and ends the episode when that reaches a limit.

        Raises:
            EpisodeStateError: After the LAST step.
        """
        if self._pending is not None and self._pending.step_type == "LAST":
            raise no_episode(ended=True)
        left_sec = self._deadline.left_sec
        if self._keeps_time and (action is None or left_sec == 0):
            return await self._cut_short("time")
        if left_sec is None:
            time_step = await super().step(action)
        else:
            try:
                async with self._deadline.hold():
                    time_step = await super().step(action)
            except DeadlinePassedError:
                return await self._give_up("time")
        self._pending = time_step
        self._usage.add(action)
        limit = self._limits.reached(self._usage)
        if time_step.step_type != "LAST" and limit is not None:
            return await self._cut_short(limit)
        return time_step

    async def truncate(self, limit: LimitName) -> TimeStep[Any]:
        """Ends the episode, which can be done with any environment here."""
        if self._pending is None or self._pending.step_type == "LAST":
            raise no_episode(ended=self._pending is not None)
        return await self._cut_short(limit)

    async def _cut_short(self, limit: LimitName) -> TimeStep[Any]:
        """Has the environment end its episode, which waits for an action; one that cannot is given up."""
        if (last := await super().truncate(limit)) is None:
            return await self._give_up(limit)
        self._truncated_by, self._pending = limit, last
        return last

    async def _give_up(self, limit: LimitName) -> TimeStep[Any]:
        observation = self._pending.observation if self._pending is not None else None
        self._truncated_by, self._is_given_up = limit, True
        self._pending = self._last = TimeStep("LAST", None, 1.0, observation)
        await super().close()
        return self._last

    def report(self) -> EpisodeReport:
        """The wrapped environment's, with the limit that ended the episode here."""
        report = super().report()
        if self._truncated_by is None:
            return report
        note = report.note or (GIVEN_UP.format(type(self.unwrapped).__name__) if self._is_given_up else None)
        return replace(report, truncated_by=self._truncated_by, note=note)

    @property
    def step_count(self) -> int:
        """The wrapped environment's; when it does not count, the steps that were applied here."""
        return super().step_count or self._usage.step_count

    @property
    def time_step(self) -> TimeStep[Any] | None:
        """The pending time step, or the LAST one."""
        return self._last or super().time_step

    def keeps(self, limits: object) -> bool:
        """Whether they are the limits that are kept here."""
        return limits == self._limits

    @property
    def is_timed(self) -> bool:
        """True: a time limit is kept here, if not by the wrapped environment."""
        return True

    @property
    def time_left_sec(self) -> float | None:
        """Seconds that the time limit leaves: the wrapped environment's own, or the one that is kept here."""
        if not self._keeps_time:
            return super().time_left_sec
        is_over = self._pending is None or self._pending.step_type == "LAST"
        return None if is_over else self._deadline.left_sec

    def grant_time(self, seconds: float) -> None:
        """Moves the time limit."""
        self._deadline.move(seconds)
        super().grant_time(seconds)
