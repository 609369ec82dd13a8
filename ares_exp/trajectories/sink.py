"""One collector as the collecting environment uses it: whatever keywords it knows, and whatever it raises."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ares_exp.results import ErrorInfo, Outcome
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

logger = logging.getLogger(__name__)


class Sink:
    """Records one environment's episodes with one collector, which may be shared and somebody else's.

    A collector that fails never changes the episode: the failure is counted, and logged the first time.

    Attributes:
        failures: How many calls of the collector raised.
    """

    def __init__(self, name: str, collector: TrajectoryCollector) -> None:
        """`name` is for messages."""
        self.failures = 0
        self._name = name
        self._collector = collector
        self._keywords = {
            name: _keywords(getattr(collector, name)) for name in ("begin_episode", "record_step", "end_episode")
        }
        self._takes_episode = bool(self._known("record_step", {"episode": None}))
        self._told: set[str] = set()
        self._episode: object | None = None
        self._active = False

    def begin(self, *, task_name: str, episode_id: str | None, start_time: float, metadata: Mapping[str, Any]) -> None:
        """Opens an episode."""
        more = {"episode_id": episode_id, "start_time": start_time, "metadata": metadata}
        with self._reported("begin_episode"):
            self._episode = self._collector.begin_episode(task_name=task_name, **self._known("begin_episode", more))
            self._active = True  # not where it failed: without a handle it would take another's episode

    def record(self, record: StepRecord) -> None:
        """Records a step of the open episode, if there is one."""
        if self._active:
            more = {"episode": self._episode} if self._takes_episode else {}
            with self._reported("record_step"):
                self._collector.record_step(record, **more)

    def end(self, outcome: Outcome, error: ErrorInfo | None, **more: Any) -> EpisodeTrajectory | None:
        """Ends the open episode, if there is one; returns it, `None` where the collector failed."""
        if not self._active:
            return None
        self._active, episode, self._episode = False, self._episode, None
        more |= {"outcome": outcome, "error": error, "episode": episode}
        with self._reported("end_episode"):
            return self._collector.end_episode(
                truncated=outcome is Outcome.TRUNCATED, **self._known("end_episode", more)
            )
        return None

    def _known(self, method: str, more: Mapping[str, Any]) -> dict[str, Any]:
        """As many of our keywords as the collector's method takes: somebody else's may take only the protocol's."""
        names = self._keywords[method]
        return {name: value for name, value in more.items() if names is None or name in names}

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures += 1
            level = logging.DEBUG if what in self._told else logging.WARNING
            self._told.add(what)
            logger.log(level, "The %s collector failed in %s: %s: %s", self._name, what, type(error).__name__, error)


def knows_handles(collector: TrajectoryCollector) -> bool:
    """Whether `collector` can keep concurrent episodes apart."""
    names = _keywords(collector.record_step)
    return names is None or "episode" in names


def _keywords(method: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the keywords that `method` takes; `None` when it takes any."""
    return _keywords_of(getattr(method, "__func__", method))


@functools.lru_cache(maxsize=256)  # of a few functions, for every episode
def _keywords_of(function: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
