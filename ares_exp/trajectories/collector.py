"""The `TrajectoryCollector` protocol, and the part that all collectors share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ares_exp.results import ErrorInfo, Outcome
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord


@dataclass(slots=True, eq=False)
class EpisodeHandle:
    """One open episode of a collector."""

    episode_id: str
    task_name: str
    start_time: float
    steps: list[StepRecord] = field(default_factory=list)


@runtime_checkable
class TrajectoryCollector(Protocol):
    """Keeps episodes. These arguments suffice; the collectors of this package take and return more.

    One instance serves concurrent environments: `begin_episode` returns a handle that the other two accept as the
    optional keyword `episode=`. Without it they mean the only open episode.
    """

    def begin_episode(self, *, task_name: str) -> object:
        """Opens an episode and returns its handle."""
        ...

    def record_step(self, record: StepRecord) -> None:
        """Adds a step. Raises `RuntimeError` with no episode in progress."""
        ...

    def end_episode(self, *, truncated: bool = False) -> EpisodeTrajectory:
        """Closes an episode and returns it whole. Raises `RuntimeError` with no episode in progress."""
        ...


class MemoryEpisodes:
    """Open episodes held in memory; subclasses say in `_keep` what becomes of a finished one."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """No episode yet. `clock` gives epoch seconds."""
        self._clock = clock
        self._open: dict[str, EpisodeHandle] = {}

    def begin_episode(
        self, *, task_name: str, episode_id: str | None = None, start_time: float | None = None
    ) -> EpisodeHandle:
        """Opens an episode; an id is made up and the time is now where they are not given."""
        started = self._clock() if start_time is None else start_time
        handle = EpisodeHandle(episode_id or uuid.uuid4().hex, task_name, started)
        if handle.episode_id in self._open:
            raise RuntimeError(f"Episode {handle.episode_id} is in progress already.")
        self._open[handle.episode_id] = handle
        return handle

    def record_step(self, record: StepRecord, *, episode: EpisodeHandle | None = None) -> None:
        """Adds a step to `episode`, by default the only open one."""
        self._resolve(episode).steps.append(record)

    def end_episode(
        self,
        *,
        truncated: bool = False,
        outcome: Outcome | None = None,
        error: ErrorInfo | None = None,
        episode: EpisodeHandle | None = None,
    ) -> EpisodeTrajectory:
        """Closes `episode`, by default the only open one, and keeps it.

        Args:
            truncated: Whether a limit ended it.
            outcome: How it ended; by default truncated or completed.
            error: What went wrong, or which limit it was.
            episode: The handle from `begin_episode`.
        """
        handle = self._resolve(episode)
        del self._open[handle.episode_id]
        trajectory = EpisodeTrajectory(
            episode_id=handle.episode_id,
            task_name=handle.task_name,
            steps=tuple(handle.steps),
            start_time=handle.start_time,
            end_time=self._clock(),
            total_reward=_total_reward(handle.steps),
            num_steps=len(handle.steps),
            truncated=truncated,
            outcome=outcome or (Outcome.TRUNCATED if truncated else Outcome.COMPLETED),
            error=error,
        )
        self._keep(trajectory)
        return trajectory

    def _keep(self, trajectory: EpisodeTrajectory) -> None:
        raise NotImplementedError

    def _resolve(self, episode: EpisodeHandle | None) -> EpisodeHandle:
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


def _total_reward(steps: list[StepRecord]) -> float | None:
    if not steps or steps[-1].step_type != "LAST" or steps[-1].reward is None:
        return None
    return sum(step.reward for step in steps if step.reward is not None)
