"""A wrapper that records the episodes of any environment. It passes actions and time steps through unchanged."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

from ares_exp.containers.activity import Activity
from ares_exp.environment import (
    EnvironmentWrapper,
    EpisodeReport,
    LimitName,
    MinimalEnvironment,
    PastStep,
    TimeStep,
)
from ares_exp.errors import EpisodeStateError
from ares_exp.llms.request import LLMRequest, freeze
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import Outcome
from ares_exp.records.run_dir import GatheredCalls, syncing_together
from ares_exp.trajectories.collector import CollectorGuard, TrajectoryCollector
from ares_exp.trajectories.records import (
    BackgroundRecord,
    Ending,
    EpisodeTrajectory,
    StepRecord,
    ending,
    serialize_llm_request,
    serialize_llm_response,
)

T = TypeVar("T", bound=TimeStep[Any] | None)

END_TIMEOUT_SEC = 10.0
"""Maximum time in seconds that a cancelled caller waits until the collectors have finished writing."""
ENDED_AT_ONCE = 4
"""Maximum number of threads that end episodes. With few threads, more episodes wait for each thread, which then syncs
them to disk together."""


class EpisodeListener(Protocol):
    """An object that is notified when episodes of a collecting environment end."""

    def reached_last(self, last: TimeStep[Any], report: EpisodeReport, *, end_time: float) -> None:
        """Handles the LAST step, before the collectors store the end of the episode. `end_time` is in epoch seconds."""
        ...

    def collector_failed(self, error: Exception, *, is_at_end: bool) -> bool:
        """Handles an exception that a collector raised. Returns whether this exception ends the run.

        If so, the caller does not count the exception as a failure, because the run reports it. `is_at_end` is true if
        `end_episode` raised the exception, which means that the collector has not stored the episode. May be called in
        any thread.
        """
        ...

    def recorded(self, trajectory: EpisodeTrajectory | None, failures: int, *, end_time: float) -> None:
        """Handles the end of an episode, after each collector has stored it or failed.

        Args:
            trajectory: The episode; `None` if every collector failed or did not finish in time.
            failures: Number of collector calls that have raised an exception so far.
            end_time: Epoch seconds.
        """
        ...


class EpisodeEnds(GatheredCalls["_Ending"]):
    """A queue of ended episodes. Threads pass them to the collectors, so that file writes do not block the event loop.

    Episodes that end at about the same time are synced to disk together, which is faster.
    """

    def __init__(self) -> None:
        """Creates an empty queue, which all environments of an event loop can share."""
        super().__init__(_end_together, at_once=ENDED_AT_ONCE)


@dataclass(slots=True)
class _Ending:
    """An ended episode in the queue. The functions in `ends` store it in collectors. `kept` are their return values."""

    ends: Sequence[tuple[CollectorGuard, Callable[[], EpisodeTrajectory | None]]]
    kept: list[EpisodeTrajectory] = field(default_factory=list)


def _end_together(endings: Sequence[_Ending]) -> None:
    try:
        with syncing_together():
            for one in endings:
                one.kept = [kept for _, end in one.ends if (kept := end()) is not None]
    except OSError as error:  # a sync failed
        for one in endings:
            one.kept = []
            for sink, _ in one.ends:
                sink.failed("end_episode", error)


class TrajectoryCollectingEnvironment(EnvironmentWrapper):
    """Wraps any `Environment`, and records every episode, including failed and abandoned episodes.

    A failure of a collector is logged and counted in `collector_failures`. Such a failure affects neither the episode
    nor the other collectors.

    Attributes:
        trajectory: The last episode that ended; `None` before the first end, or if every collector failed.
    """

    def __init__(
        self,
        env: MinimalEnvironment,
        collector: TrajectoryCollector | Mapping[str, TrajectoryCollector],
        *,
        episode_id: str | None = None,
        task_name: str | None = None,
        start_time: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        listener: EpisodeListener | None = None,
        ends: EpisodeEnds | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Wraps `env`.

        Args:
            env: The environment to record.
            collector: One collector, or a mapping of names to collectors.
            episode_id: Id of the first episode, if the collector accepts ids. Later episodes get generated ids.
            task_name: Name of the task; by default the name that the environment reports.
            start_time: Start of the first episode, in epoch seconds; by default the time of `reset()`.
            metadata: JSON-ready metadata of each episode, for collectors that accept metadata.
            listener: Object to notify when an episode ends.
            ends: Queue of ended episodes, which several environments may share; by default a new queue.
            clock: Function that returns epoch seconds.

        Raises:
            TypeError: `metadata` is not JSON-ready.
        """
        super().__init__(env)
        several = collector if isinstance(collector, Mapping) else {"trajectory": collector}
        ends_run = listener.collector_failed if listener is not None else None
        self._sinks = [CollectorGuard(name, one, ends_run) for name, one in several.items()]
        self._episode_id = episode_id
        self._task_name = task_name
        self._start_time = start_time
        self._metadata = freeze(metadata or {})
        self._listener = listener
        self._ends = ends or EpisodeEnds()
        self._clock = clock
        self._active = False
        self._step_index = 0
        self._waiting_since: float | None = None
        self.trajectory: EpisodeTrajectory | None = None

    @property
    def collector_failures(self) -> int:
        """Number of collector calls that raised an exception."""
        return sum(sink.failures for sink in self._sinks)

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode. If an episode is running, first ends its record with the outcome `abandoned`."""
        await self._end(Ending(Outcome.ABANDONED))
        start_time, started = self._start_time or self._clock(), time.perf_counter()
        self._start_time = None
        try:
            time_step = await super().reset(seed=seed, options=options)
        except BaseException as error:
            self._start(start_time)
            missing = TimeStep("FIRST", None, None, None)
            await self._end(ending(None, error), self._record_now(missing, None, None, started))
            raise
        self._start(start_time)
        if len(past := self.past_steps) > 1:  # the episode continues from an earlier point
            self._record_past(past)
        else:
            self._record(self._record_now(time_step, None, None, started))
        return time_step

    async def step(self, action: Any) -> TimeStep[Any]:
        """Steps the environment and records the step. If earlier steps are not recorded yet, records them first."""
        if not self._active:
            self._adopt()
        waited = None if self._waiting_since is None else time.perf_counter() - self._waiting_since
        return await self._recorded(self._env.step, action, action=action, policy_sec=waited)

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Ends the episode because of `limit`, and records its LAST step. Returns `None` if this is not supported."""
        if not self._active:
            self._adopt()
        return await self._recorded(super().truncate, limit)

    async def _recorded(
        self,
        call: Callable[[Any], Awaitable[T]],
        argument: Any,
        *,
        action: Any = None,
        policy_sec: float | None = None,
    ) -> T:
        """Calls the environment with `argument`, and records the time step or the exception."""
        started = time.perf_counter()
        try:
            time_step = await call(argument)
        except EpisodeStateError:
            raise  # an invalid call, which changed nothing
        except BaseException as error:
            missing = TimeStep("MID", None, None, None)
            await self._end(ending(None, error), self._record_now(missing, action, policy_sec, started))
            raise
        if time_step is not None:
            self._record(self._record_now(time_step, action, policy_sec, started))
            if time_step.step_type == "LAST":
                await self._end_at(time_step)
        return time_step

    async def close(self) -> None:
        """Closes the environment. If an episode is running, first ends its record with the outcome `closed`."""
        try:
            await self._end(Ending(Outcome.CLOSED))
        finally:
            await super().close()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment. If an episode is running, first ends its record with the exception, if any."""
        try:
            await self._end(Ending(Outcome.CLOSED) if exc is None else ending(None, exc))
        finally:
            await super().__aexit__(exc_type, exc, traceback)

    def _adopt(self) -> None:
        """Starts recording an episode that was already running when the environment was wrapped."""
        if self.trajectory is None and (past := self.past_steps):
            self._start(past[0].timestamp)
            self._record_past(past)
            self._waiting_since = None  # the start of the policy's time is unknown

    def _record_past(self, past: Sequence[PastStep]) -> None:
        """Records the time steps from before the recording started. The last one has no action yet."""
        for one in past:
            spent = one.policy_sec, one.environment_sec
            self._record(self._record_of(one.time_step, one.action, spent, one.activity, one.timestamp))

    def _start(self, start_time: float) -> None:
        """Opens an episode in all collectors. Must be called after the environment's reset, which selects the task."""
        self._step_index, self.trajectory, self._active = 0, None, True
        episode_id, self._episode_id = self._episode_id, None
        report = self.report()
        image, lineage, edits = report.container_image, report.lineage, report.edits
        for sink in self._sinks:
            sink.start(
                task_name=self._task_name or report.task_name or type(self.unwrapped).__name__,
                episode_id=episode_id,
                start_time=start_time,
                metadata=({"agent": report.agent} if report.agent is not None else {})
                | self._metadata
                | ({"container_image": image} if image is not None else {})
                | ({"lineage": freeze(lineage)} if lineage else {})
                | ({"edits": freeze([edit.to_dict() for edit in edits])} if edits else {}),
            )

    def _record_now(
        self, time_step: TimeStep[Any], action: Any, policy_sec: float | None, started: float
    ) -> StepRecord:
        spent = policy_sec, time.perf_counter() - started
        return self._record_of(time_step, action, spent, self.activity, self._clock())

    def _record_of(
        self,
        time_step: TimeStep[Any],
        action: Any,
        spent: tuple[float | None, float],
        seen: Activity | None,
        timestamp: float,
    ) -> StepRecord:
        return StepRecord(
            step_index=self._step_index,
            step_type=time_step.step_type,
            observation=_serialize(time_step.observation),
            action=_serialize(action),
            reward=_number(time_step.reward),
            discount=_number(time_step.discount),
            timestamp=timestamp,
            policy_sec=spent[0],
            environment_sec=spent[1],
            container_sec=None if seen is None else seen.container_sec,
            commands=() if seen is None else tuple(seen.commands),
            background_requests=() if seen is None else tuple(map(BackgroundRecord.of, seen.background_requests)),
        )

    def _record(self, record: StepRecord) -> None:
        if not self._active:
            return
        for sink in self._sinks:
            sink.record(record)
        self._step_index += 1
        self._waiting_since = time.perf_counter()

    async def _end_at(self, last: TimeStep[Any]) -> None:
        end_time, report = self._clock(), self.report()
        if self._listener is not None:
            self._listener.reached_last(last, report, end_time=end_time)
        ended = ending(last, limit=report.truncated_by, note=report.limit_note)
        await self._end(ended, rewards=report.rewards, end_time=end_time)

    async def _end(
        self,
        ended: Ending,
        unfinished: StepRecord | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        end_time: float | None = None,
    ) -> None:
        """Ends the running episode, if any. The collectors store it in another thread, because they may write files."""
        if not self._active:
            return
        self._active = False
        self._waiting_since = None
        ended_at = self._clock() if end_time is None else end_time

        more: dict[str, Any] = {"end_time": ended_at, "unfinished_step": unfinished}
        more |= {"rewards": rewards} if rewards else {}
        one = _Ending([(sink, sink.close(ended.outcome, ended.error, **more)) for sink in self._sinks])
        writing = self._ends.put(one)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing}, timeout=END_TIMEOUT_SEC)
            raise
        finally:
            self.trajectory = max(one.kept, key=lambda kept: kept.num_steps, default=None)
            if self._listener is not None:
                self._listener.recorded(self.trajectory, self.collector_failures, end_time=ended_at)


def _number(value: Any) -> float | None:
    """Converts a reward or discount for JSON. Numpy numbers become floats, and non-finite numbers become `None`."""
    return None if value is None or not math.isfinite(value) else float(value)


def _serialize(value: Any) -> Mapping[str, Any] | None:
    """Converts an observation or action to immutable, JSON-ready data. Unsupported objects become their `repr`."""
    if isinstance(value, LLMRequest):
        return serialize_llm_request(value)
    if isinstance(value, LLMResponse):
        return serialize_llm_response(value)
    try:
        plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        frozen: Mapping[str, Any] = freeze(plain if plain is None or isinstance(plain, Mapping) else {"value": plain})
    except Exception:  # a numpy number, a lock, a cycle: custom classes may contain anything
        return freeze({"value": _repr(value)})  # type: ignore[no-any-return]
    return frozen


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__} without a repr: {type(error).__name__}>"
