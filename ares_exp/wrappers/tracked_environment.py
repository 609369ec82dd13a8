"""A wrapper that reports each episode of an environment to a tracker. It does not change observations or actions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from ares_exp.environment import EnvironmentWrapper, LimitName, MinimalEnvironment, TimeStep
from ares_exp.errors import EpisodeStateError, UserError
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.episode_events import EpisodeEvents
from ares_exp.records.results import Outcome
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import PlannedEpisode
from ares_exp.trackers.tracker import SeveralTrackers, Tracker


class TrackedEnvironment(EnvironmentWrapper):
    """Calls `log_episode` of a tracker for every episode that has ended or failed, without its trajectory.

    The caller must start the tracker before the first episode, and finish it at the end. Exceptions of the tracker do
    not affect the episode.
    """

    def __init__(self, env: MinimalEnvironment, tracker: Tracker) -> None:
        """Wraps `env`. Closing the wrapper closes `env`."""
        super().__init__(env)
        self._tracker = SeveralTrackers({"tracker": tracker})
        self._events: EpisodeEvents | None = None
        self._started_at = 0.0

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode. If an episode is running, first reports it with the outcome `abandoned`."""
        self._end(Outcome.ABANDONED)
        self._events, self._started_at = EpisodeEvents(), time.time()
        try:
            time_step = await super().reset(seed=seed, options=options)
        except BaseException as error:
            if isinstance(error, UserError) and self.report().task_name is None:
                self._events = None  # the task or its container is unavailable: no episode started
            self._end(failure=error)
            raise
        self._events.wait_for("policy")
        return time_step

    async def step(self, action: Any) -> TimeStep[Any]:
        """Steps the environment. Reports the episode after its LAST step or an error."""
        if (events := self._events) is not None:
            events.policy_sec += time.monotonic() - events.since
        try:
            time_step = await self._env.step(action)
        except EpisodeStateError:
            raise  # an invalid call, which changed nothing
        except BaseException as error:
            self._count(action)
            self._end(failure=error)
            raise
        self._count(action)
        return self._seen(time_step)

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Ends the episode because of `limit`, and reports it. Returns `None` if this is not supported."""
        try:
            last = await super().truncate(limit)
        except EpisodeStateError:
            raise
        except BaseException as error:
            self._end(failure=error)
            raise
        return self._seen(last) if last is not None else None

    def _seen(self, time_step: TimeStep[Any]) -> TimeStep[Any]:
        """Reports the episode if the time step is LAST. Returns the time step unchanged."""
        if self._events is not None:
            self._events.wait_for("policy")
            if time_step.step_type == "LAST":
                self._events.last = time_step
                self._end()
        return time_step

    async def close(self) -> None:
        """Closes the environment. If an episode is running, first reports it with the outcome `closed`."""
        self._end(Outcome.CLOSED)
        await super().close()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment. If an episode is running, first reports it with the exception, if any."""
        self._end(Outcome.CLOSED if exc is None else None, failure=exc)
        await super().__aexit__(exc_type, exc, traceback)

    def _count(self, action: Any) -> None:
        if self._events is not None and isinstance(action, LLMResponse):
            self._events.usage.add(action)

    def _end(self, outcome: Outcome | None = None, *, failure: BaseException | None = None) -> None:
        events, self._events = self._events, None
        if events is None:
            return
        report = self.report()
        name, seed = report.task_name or type(self.unwrapped).__name__, report.seed or 0
        planned = PlannedEpisode("", name, report.attempt or 0, seed).anew(retry=0, seed=seed)
        episode = RunningEpisode(
            usage=events.usage,
            policy_sec=events.policy_sec,
            last=events.last,
            planned=planned,
            started_at=self._started_at,
            environment=self,
        )
        result = episode.to_result(failure)
        if outcome is not None and events.last is None:
            result = replace(result, outcome=outcome, error=None)
        self._tracker.log_episode(result)
