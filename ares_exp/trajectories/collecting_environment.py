"""The collecting environment: any environment, recorded. Data passes through untouched."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from types import TracebackType
from typing import Any, Self

from ares_exp.environments.environment import Environment
from ares_exp.environments.time_step import TimeStep
from ares_exp.errors import EpisodeStateError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.results import ErrorInfo, Outcome
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, serialize_llm_request, serialize_llm_response

logger = logging.getLogger(__name__)

END_TIMEOUT_SEC = 10.0
"""How long a cancelled caller waits for the collector to finish writing."""


class TrajectoryCollectingEnvironment:
    """Wraps any `Environment` and records every episode, however it ends.

    A collector that fails never changes the episode: the failure is logged and counted in `collector_failures`.

    Attributes:
        trajectory: The episode that ended last; `None` before that, and when the collector failed on it.
        collector_failures: How many calls of the collector raised.
    """

    def __init__(
        self,
        env: Environment,
        collector: TrajectoryCollector,
        *,
        episode_id: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Records `env` with `collector`.

        Args:
            env: What is recorded.
            collector: Where it goes.
            episode_id: Id of the first episode, where the collector takes one; others are made up.
            clock: Gives epoch seconds.
        """
        self._env = env
        self._collector = _Handles(collector)
        self._episode_id = episode_id
        self._clock = clock
        self._episode: object | None = None
        self._active = False
        self._step_index = 0
        self.trajectory: EpisodeTrajectory | None = None
        self.collector_failures = 0

    def __getattr__(self, name: str) -> Any:
        """Public attributes of the wrapped environment (`step_count`, `current_task`, …)."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    async def reset(self, **options: Any) -> TimeStep[Any]:
        """Starts an episode; one under way is recorded as abandoned."""
        await self._end(Outcome.ABANDONED)
        start_time = self._clock()
        try:
            time_step = await self._env.reset(**options)
        except BaseException as error:
            self._begin(start_time)
            await self._end_with(error)
            raise
        self._begin(start_time)
        self._record(time_step, action=None)
        return time_step

    async def step(self, action: Any) -> TimeStep[Any]:
        """Steps and records; a LAST step ends the episode."""
        try:
            time_step = await self._env.step(action)
        except EpisodeStateError:
            raise  # a call that made no sense: it changed nothing
        except BaseException as error:
            await self._end_with(error)
            raise
        self._record(time_step, action)
        if time_step.step_type == "LAST":
            await self._end_at(time_step)
        return time_step

    async def close(self) -> None:
        """Closes the environment; an episode under way is recorded as closed."""
        try:
            await self._end(Outcome.CLOSED)
        finally:
            await self._env.close()

    async def __aenter__(self) -> Self:
        """Enters the wrapped environment."""
        await self._env.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the wrapped environment; an episode under way is recorded with the exception, or as closed."""
        try:
            await (self._end(Outcome.CLOSED) if exc is None else self._end_with(exc))
        finally:
            await self._env.__aexit__(exc_type, exc, traceback)

    def _begin(self, start_time: float) -> None:
        """Opens an episode: after the environment's reset, which is what chooses the task."""
        self._step_index, self.trajectory = 0, None
        episode_id, self._episode_id = self._episode_id, None
        task = getattr(self._env, "current_task", None)
        with self._reported("begin_episode"):
            self._episode = self._collector.begin(
                task_name=str(getattr(task, "name", task) or type(self._env).__name__),
                episode_id=episode_id,
                start_time=start_time,
            )
            self._active = True  # not where the collector failed: without a handle it would take another's episode

    def _record(self, time_step: TimeStep[Any], action: Any) -> None:
        """Records a time step; also one of another package's class with the same fields."""
        if not self._active:
            return
        with self._reported("record_step"):
            self._collector.record(
                StepRecord(
                    step_index=self._step_index,
                    step_type=time_step.step_type,
                    observation=_serialize(time_step.observation),
                    action=_serialize(action),
                    reward=time_step.reward,
                    discount=time_step.discount,
                    timestamp=self._clock(),
                ),
                self._episode,
            )
        self._step_index += 1

    async def _end_at(self, last: TimeStep[Any]) -> None:
        if not last.discount:
            await self._end(Outcome.COMPLETED)
            return
        limit = getattr(self._env, "truncated_by", None)
        await self._end(Outcome.TRUNCATED, ErrorInfo("limit", f"limit reached: {limit or 'unknown'}"))

    async def _end_with(self, error: BaseException) -> None:
        await self._end(Outcome.of(error), ErrorInfo.of(error))

    async def _end(self, outcome: Outcome, error: ErrorInfo | None = None) -> None:
        """Ends the episode under way, if any. The collector may write files, so it is called in a thread."""
        if not self._active:
            return
        self._active, episode, self._episode = False, self._episode, None

        def end() -> None:
            with self._reported("end_episode"):
                self.trajectory = self._collector.end(episode, outcome, error)

        writing = asyncio.get_running_loop().run_in_executor(None, end)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing}, timeout=END_TIMEOUT_SEC)
            raise

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.collector_failures += 1
            logger.warning("The trajectory collector failed in %s: %s: %s", what, type(error).__name__, error)


def knows_handles(collector: TrajectoryCollector) -> bool:
    """Whether `collector` can keep concurrent episodes apart."""
    names = _keywords(collector.record_step)
    return names is None or "episode" in names


class _Handles:
    """A collector called with as many of our keywords as it knows: somebody else's may know only the protocol's."""

    def __init__(self, collector: TrajectoryCollector) -> None:
        self._begin, self._begin_names = collector.begin_episode, _keywords(collector.begin_episode)
        self._record, self._record_names = collector.record_step, _keywords(collector.record_step)
        self._end, self._end_names = collector.end_episode, _keywords(collector.end_episode)

    def begin(self, **more: Any) -> object:
        return self._begin(**_known(more, self._begin_names))

    def record(self, record: StepRecord, episode: object) -> None:
        self._record(record, **_known({"episode": episode}, self._record_names))

    def end(self, episode: object, outcome: Outcome, error: ErrorInfo | None) -> EpisodeTrajectory:
        more = {
            "truncated": outcome is Outcome.TRUNCATED,
            "outcome": outcome,
            "error": error,
            "episode": episode,
        }
        return self._end(**_known(more, self._end_names))


def _known(more: dict[str, Any], names: frozenset[str] | None) -> dict[str, Any]:
    return more if names is None else {name: value for name, value in more.items() if name in names}


def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the keywords that `function` takes; `None` when it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _serialize(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, LLMRequest):
        return serialize_llm_request(value)
    if isinstance(value, LLMResponse):
        return serialize_llm_response(value)
    if value is None or isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return {"value": value if isinstance(value, str | int | float | bool) else repr(value)}
