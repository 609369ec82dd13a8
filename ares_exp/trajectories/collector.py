"""The contract of a trajectory collector, and the part that all collectors of this package share."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ares_exp.config.parts import StandIn
from ares_exp.llms.request import freeze
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.records.run_dir import append_text
from ares_exp.trajectories.files.step_encoding import StepEncoder
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, total_reward


@dataclass(slots=True, eq=False)
class EpisodeHandle:
    """One open episode of a collector.

    Attributes:
        episode_id, task_name, start_time, metadata: As in `EpisodeTrajectory`.
        steps: What was recorded so far; equal messages are the same objects.
        encoder: Encodes them.
        unwritten: Why the collector's file lacks some of it; `None` when everything up to now was written.
    """

    episode_id: str
    task_name: str
    start_time: float
    metadata: Mapping[str, Any]
    steps: list[StepRecord] = field(default_factory=list)
    encoder: StepEncoder = field(default_factory=StepEncoder)
    unwritten: Exception | None = None


@runtime_checkable
class TrajectoryCollector(Protocol):
    """Keeps episodes. These arguments suffice; what else a collector can be given is `CollectorBase`."""

    def begin_episode(self, *, task_name: str) -> object:
        """Opens an episode and returns its handle."""
        ...

    def record_step(self, record: StepRecord) -> None:
        """Adds a step. Raises `RuntimeError` with no episode in progress."""
        ...

    def end_episode(self, *, truncated: bool = False) -> EpisodeTrajectory:
        """Closes an episode and returns it whole. Raises `RuntimeError` with no episode in progress."""
        ...


class CollectorBase(TrajectoryCollector):
    """Everything that a collector is given. One that does not inherit this gets as many of the keywords as it takes.

    One instance serves concurrent environments: `begin_episode` returns a handle that the other two accept as
    `episode=`. Without it they mean the only open episode.
    """

    @property
    def keeps_apart(self) -> bool:
        """Whether concurrent episodes can be recorded. If not, `concurrency=1` is needed. Default: yes.

        Of a collector that does not inherit this: whether its `record_step` takes the keyword `episode`.
        """
        return True

    def begin_episode(
        self,
        *,
        task_name: str,
        episode_id: str | None = None,
        start_time: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Any:
        """Opens an episode and returns its handle.

        Args:
            task_name: Name of its task.
            episode_id: Its id; by default made up.
            start_time: Epoch seconds; by default now.
            metadata: What else is known of it, JSON-ready.
        """
        raise NotImplementedError

    def record_step(self, record: StepRecord, *, episode: Any = None) -> None:
        """Adds a step to `episode`, by default the only open one. Raises `RuntimeError` where there is none."""
        raise NotImplementedError

    def end_episode(
        self,
        *,
        truncated: bool = False,
        outcome: Outcome | None = None,
        error: ErrorInfo | None = None,
        end_time: float | None = None,
        unfinished_step: StepRecord | None = None,
        rewards: Mapping[str, float] | None = None,
        episode: Any = None,
    ) -> EpisodeTrajectory:
        """Closes `episode`, by default the only open one, keeps it and returns it whole.

        Args:
            truncated: Whether a limit ended it.
            outcome: How it ended; by default truncated or completed.
            error: What went wrong, or which limit it was.
            end_time: Epoch seconds; by default now.
            unfinished_step: What is known of the reset or step that ended it by raising.
            rewards: What verifier and scorers said, by name; by default nothing.
            episode: The handle from `begin_episode`.

        Raises:
            RuntimeError: There is no such episode in progress.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Releases what the collector holds, at the end of a run. Idempotent. Default: nothing."""


class EpisodeCollector(CollectorBase):
    """Open episodes, in memory, for any number of environments and threads.

    Subclasses keep an episode when it starts (`_started`), at each step (`_recorded`) and when it has ended (`_ended`).
    An exception there does not touch what is in memory: the steps are kept, and the episode ends.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """No episode yet. `clock` gives epoch seconds."""
        self._clock = clock
        self._open: dict[str, EpisodeHandle] = {}
        self._lock = threading.Lock()

    def begin_episode(
        self,
        *,
        task_name: str,
        episode_id: str | None = None,
        start_time: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeHandle:
        """Opens an episode; an id is made up and the time is now where they are not given.

        Raises:
            TypeError: `metadata` is not JSON-ready.
        """
        started = self._clock() if start_time is None else start_time
        handle = EpisodeHandle(episode_id or uuid.uuid4().hex, task_name, started, freeze(metadata or {}))
        with self._lock:
            if handle.episode_id in self._open:
                raise RuntimeError(f"Episode {handle.episode_id} is in progress already.")
            self._open[handle.episode_id] = handle
        self._started(handle)
        return handle

    def record_step(self, record: StepRecord, *, episode: EpisodeHandle | None = None) -> None:
        """Adds a step to `episode`, by default the only open one."""
        handle = self._resolve(episode)
        try:
            shared, encoded = handle.encoder.encode(record)
        except Exception as error:  # the encoder now knows of messages that no file has
            handle.unwritten = handle.unwritten or error
            raise
        handle.steps.append(shared)
        self._recorded(handle, encoded)

    def end_episode(
        self,
        *,
        truncated: bool = False,
        outcome: Outcome | None = None,
        error: ErrorInfo | None = None,
        end_time: float | None = None,
        unfinished_step: StepRecord | None = None,
        rewards: Mapping[str, float] | None = None,
        episode: EpisodeHandle | None = None,
    ) -> EpisodeTrajectory:
        """As `CollectorBase.end_episode`."""
        handle = self._resolve(episode)
        with self._lock:
            del self._open[handle.episode_id]
        trajectory = EpisodeTrajectory(
            episode_id=handle.episode_id,
            task_name=handle.task_name,
            steps=tuple(handle.steps),
            start_time=handle.start_time,
            end_time=self._clock() if end_time is None else end_time,
            total_reward=total_reward(handle.steps),
            num_steps=len(handle.steps),
            truncated=truncated,
            outcome=outcome or (Outcome.TRUNCATED if truncated else Outcome.COMPLETED),
            error=error,
            metadata=handle.metadata,
            unfinished_step=unfinished_step,
            rewards=rewards or {},
        )
        self._ended(handle, trajectory)
        return trajectory

    def _started(self, handle: EpisodeHandle) -> None:
        """An episode was opened."""

    def _recorded(self, handle: EpisodeHandle, encoded: Mapping[str, Any]) -> None:
        """A step was added; `encoded` as `step_encoding` tells."""

    def _ended(self, handle: EpisodeHandle, trajectory: EpisodeTrajectory) -> None:
        """An episode has ended."""

    def _append(self, handle: EpisodeHandle, path: Path | str, line: str) -> None:
        """Appends the line of a step to the episode's file, unless the file lacks earlier lines.

        Raises:
            OSError: The line cannot be written, or the lines before the first step could not be. It is raised once per
                episode. A file that another process has removed is no error: `_ended` writes it again.
        """
        try:
            if handle.unwritten is None:
                append_text(path, line)
                return
            failure = handle.unwritten if len(handle.steps) == 1 else None
        except OSError as error:
            failure = handle.unwritten = error
        if failure is not None and not isinstance(failure, FileNotFoundError):
            raise failure

    def _resolve(self, episode: EpisodeHandle | None) -> EpisodeHandle:
        with self._lock:
            if episode is None:
                if not self._open:
                    raise RuntimeError("No episode in progress: call begin_episode() first.")
                if len(self._open) > 1:
                    raise RuntimeError(f"{len(self._open)} episodes are in progress: say which with `episode=`.")
                return next(iter(self._open.values()))
            if self._open.get(episode.episode_id) is not episode:
                raise RuntimeError(
                    f"No episode in progress with the id {episode.episode_id}: it has ended, or is another's."
                )
            return episode


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
    @property
    def keeps_apart(self) -> bool:
        return "episode" in _known({"episode": None}, self._part.record_step)

    def begin_episode(self, **given: Any) -> Any:
        return self._part.begin_episode(**_known(given, self._part.begin_episode))

    def record_step(self, record: StepRecord, **given: Any) -> None:
        self._part.record_step(record, **_known(given, self._part.record_step))

    def end_episode(self, **given: Any) -> EpisodeTrajectory:
        trajectory: EpisodeTrajectory = self._part.end_episode(**_known(given, self._part.end_episode))
        return trajectory

    def close(self) -> None:
        if isinstance(self._part, _Closable):
            self._part.close()


def _known(given: Mapping[str, Any], method: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the keywords that `method` takes."""
    names = _keywords_of(method.__func__ if inspect.ismethod(method) else method)
    return given if names is None else {name: value for name, value in given.items() if name in names}


@functools.lru_cache(maxsize=256)  # of a few functions, for every episode
def _keywords_of(function: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
