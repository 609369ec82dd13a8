"""One collector as the collecting environment uses it: whatever keywords it knows, and whatever it raises."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from ares_exp.config.parts import StandIn
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories.collector import CollectorBase, TrajectoryCollector
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

logger = logging.getLogger(__name__)


class CollectorGuard:
    """Records one environment's episodes with one collector, which may be shared and somebody else's.

    A collector that fails never changes the episode: the failure is counted, and logged the first time. A failure that
    ends the run is neither: the run reports it.

    Attributes:
        failures: How many calls of the collector raised.
    """

    def __init__(self, name: str, collector: TrajectoryCollector, ends_run: Callable[..., bool] | None = None) -> None:
        """Takes the collector.

        Args:
            name: Its name in messages.
            collector: The collector.
            ends_run: A function like `EpisodeListener.collector_failed`.
        """
        self.failures = 0
        self._name = name
        self._collector = as_collector(collector)
        self._ends_run = ends_run
        self._told: set[str] = set()
        self._episode: object | None = None
        self._active = False

    def start(self, *, task_name: str, episode_id: str | None, start_time: float, metadata: Mapping[str, Any]) -> None:
        """Opens an episode."""
        try:
            self._episode = self._collector.begin_episode(
                task_name=task_name, episode_id=episode_id, start_time=start_time, metadata=metadata
            )
            self._active = True  # not where it failed: without a handle it would take another's episode
        except Exception as error:
            self.failed("begin_episode", error)

    def record(self, record: StepRecord) -> None:
        """Records a step of the open episode, if there is one."""
        if self._active:
            try:
                self._collector.record_step(record, episode=self._episode)
            except Exception as error:
                self.failed("record_step", error)

    def close(self, outcome: Outcome, error: ErrorInfo | None, **more: Any) -> Callable[[], EpisodeTrajectory | None]:
        """Closes the open episode for further steps.

        Args:
            outcome: How it ended.
            error: What went wrong, or the limit that was reached.
            more: Other keywords of `CollectorBase.end_episode`.

        Returns:
            A function that ends the episode, for any thread. It returns what the collector kept: `None` if there was no
            episode, or if the collector failed.
        """
        if not self._active:
            return lambda: None
        self._active, episode, self._episode = False, self._episode, None

        def end() -> EpisodeTrajectory | None:
            truncated = outcome is Outcome.TRUNCATED
            try:
                return self._collector.end_episode(
                    truncated=truncated, outcome=outcome, error=error, episode=episode, **more
                )
            except Exception as failure:
                self.failed("end_episode", failure)
                return None

        return end

    def failed(self, what: str, error: Exception) -> None:
        """Counts a call that raised, unless the exception ends the run."""
        if self._ends_run is not None and self._ends_run(error, is_at_end=what == "end_episode"):
            logger.debug("The %s collector failed in %s", self._name, what, exc_info=error)
            return
        self.failures += 1
        level = logging.DEBUG if what in self._told else logging.WARNING
        self._told.add(what)
        logger.log(level, "The %s collector failed in %s: %s: %s", self._name, what, type(error).__name__, error)


def as_collector(collector: TrajectoryCollector) -> CollectorBase:
    """Returns `collector` as one that can be given everything; what it does not take is left out."""
    return collector if isinstance(collector, CollectorBase) else _ForeignCollector(collector)


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


class _ForeignCollector(StandIn, CollectorBase):
    def __init__(self, collector: TrajectoryCollector) -> None:
        super().__init__(collector)
        self._start = _lenient(collector.begin_episode)
        self._record = _lenient(collector.record_step)
        self._end = _lenient(collector.end_episode)

    @property
    def keeps_apart(self) -> bool:
        return _takes(self._part.record_step, "episode")

    def begin_episode(self, **given: Any) -> Any:
        return self._start(**given)

    def record_step(self, record: StepRecord, **given: Any) -> None:
        self._record(record, **given)

    def end_episode(self, **given: Any) -> EpisodeTrajectory:
        trajectory: EpisodeTrajectory = self._end(**given)
        return trajectory

    def close(self) -> None:
        if isinstance(self._part, _Closable):
            self._part.close()


def _lenient(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `method` with the keywords left out that it does not take."""
    return lambda *positional, **given: method(*positional, **{k: v for k, v in given.items() if _takes(method, k)})


def _takes(method: Callable[..., Any], keyword: str) -> bool:
    """Whether `method` takes a keyword of that name."""
    names = _keywords_of(method.__func__ if inspect.ismethod(method) else method)
    return names is None or keyword in names


@functools.lru_cache(maxsize=256)  # of a few functions, for every episode
def _keywords_of(function: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
