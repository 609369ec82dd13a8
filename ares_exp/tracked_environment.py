"""The tracked environment: any environment, each of whose episodes is reported to a tracker. Data passes untouched."""

from __future__ import annotations

import time
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from ares_exp.environments.environment import Environment
from ares_exp.environments.time_step import TimeStep
from ares_exp.episode_plan import PlannedEpisode
from ares_exp.errors import EpisodeStateError, UserError
from ares_exp.llms.response import LLMResponse
from ares_exp.playing import Playing
from ares_exp.results import Outcome
from ares_exp.rollout import Tally
from ares_exp.trackers.several import SeveralTrackers
from ares_exp.trackers.tracker import Tracker


class TrackedEnvironment:
    """Tells a tracker of every episode that ends, however it does: `log_episode`, once for each, without a trajectory.

    The tracker is its user's: who made it starts it, with what run the episodes belong to, and finishes it. One that
    raises changes nothing of the episode.
    """

    def __init__(self, env: Environment, tracker: Tracker) -> None:
        """Touches nothing.

        Args:
            env: What is played, which this environment then owns.
            tracker: Is told.
        """
        self._env = env
        self._tracker = SeveralTrackers({"tracker": tracker})
        self._tally: Tally | None = None
        self._started_at = 0.0

    def __getattr__(self, name: str) -> Any:
        """Public attributes of the wrapped environment (`step_count`, `current_task`, …)."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    async def reset(self, **options: Any) -> TimeStep[Any]:
        """Starts an episode; one under way is reported as abandoned."""
        self._end(Outcome.ABANDONED)
        self._tally, self._started_at = Tally(), time.time()
        try:
            time_step = await self._env.reset(**options)
        except BaseException as error:
            if isinstance(error, UserError) and getattr(self._env, "current_task", None) is None:
                self._tally = None  # no such task, or nothing to play it with: no episode began
            self._end(failure=error)
            raise
        self._tally.wait_for("policy")
        return time_step

    async def step(self, action: Any) -> TimeStep[Any]:
        """Steps; the LAST step, or an error, ends the episode."""
        tally = self._tally
        if tally is not None:
            tally.policy_sec += time.monotonic() - tally.since
        try:
            time_step = await self._env.step(action)
        except EpisodeStateError:
            raise  # a call that made no sense: it changed nothing
        except BaseException as error:
            self._count(action)
            self._end(failure=error)
            raise
        self._count(action)
        if tally is not None:
            tally.wait_for("policy")
            if time_step.step_type == "LAST":
                tally.last = time_step
                self._end()
        return time_step

    async def close(self) -> None:
        """Closes the environment; an episode under way is reported as closed."""
        self._end(Outcome.CLOSED)
        await self._env.close()

    async def __aenter__(self) -> Self:
        """Enters the wrapped environment."""
        await self._env.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the wrapped environment; an episode under way is reported with the exception, or as closed."""
        self._end(Outcome.CLOSED if exc is None else None, failure=exc)
        await self._env.__aexit__(exc_type, exc, traceback)

    def _count(self, action: Any) -> None:
        if self._tally is not None and isinstance(action, LLMResponse):
            self._tally.add(action)

    def _end(self, outcome: Outcome | None = None, *, failure: BaseException | None = None) -> None:
        """Reports the episode under way, if there is one."""
        tally, self._tally = self._tally, None
        if tally is None:
            return
        task = getattr(self._env, "current_task", None)
        name = str(getattr(task, "name", task) or type(self._env).__name__)
        seed = int(getattr(self._env, "episode_seed", 0))
        attempt = int(getattr(self._env, "attempt", 0))
        planned = PlannedEpisode("", name, attempt, seed).anew(retry=0, seed=seed)
        environment: Any = self._env
        playing = Playing(planned, self._started_at, tally, environment)
        result = playing.result(failure)
        if outcome is not None and tally.last is None:
            result = replace(result, outcome=outcome, error=None)
        self._tracker.log_episode(result)
