"""The options of the config group `snapshot`: when a run takes snapshots, and which snapshots it keeps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.environment import EnvironmentBase

logger = logging.getLogger(__name__)


class NoSnapshots:
    """`snapshot=none`: episodes run without snapshots."""

    output_dir: Path | None = None
    is_only_to_continue: bool = False

    def around(self, env: EnvironmentBase, *, episode_id: str) -> EnvironmentBase:
        """Returns `env` unchanged, so that no snapshots are taken."""
        return env

    def collect_garbage(self) -> None:
        """Does nothing, because there are no snapshots."""


class SnapshotSchedule:
    """Takes a snapshot at every n-th step of each episode of a run, and deletes snapshots that are no longer needed.

    Attributes:
        output_dir: Directory of the snapshot store.
        timeout_sec: Time limit of one snapshot in seconds.
        is_only_to_continue: Whether the snapshots only serve to continue episodes. If so, a run requires an agent that
            can be restored.
    """

    @validate_call
    def __init__(
        self,
        output_dir: Path,
        *,
        every: Annotated[int, Field(ge=1)] | None,
        keep: Annotated[int, Field(ge=1)] | None = None,
        success_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None,
        timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0,
        gc: bool = True,
    ) -> None:
        """Stores the options without side effects.

        Args:
            output_dir: Directory of the snapshot store. The first snapshot creates it.
            every: Number of applied responses between two snapshots: 1 means every step, 5 means steps 0, 5, 10, …
                Snapshots are taken while the environment waits for an action. With `None`, they are taken only on
                request.
            keep: Number of snapshots to keep per episode; the oldest ones are deleted. `None` keeps all.
            success_reward: Smallest reward of a successful episode. The snapshots of an episode with at least this
                reward are deleted at its end. `None` keeps all of them.
            timeout_sec: Time limit of a snapshot in seconds. A snapshot that takes longer is cancelled, reported and
                counted as failed.
            gc: Whether to remove the objects of deleted snapshots at the end of the run. Use `False` if several runs
                write to one store.
        """
        from ares_exp.snapshots.store import SnapshotStore

        self.output_dir = output_dir
        self.timeout_sec = timeout_sec
        self.is_only_to_continue = every is not None and success_reward is None
        self._every = every
        self._keep = keep
        self._success_reward = success_reward
        self._gc = gc
        self._store = SnapshotStore(output_dir)
        self._has_garbage = False
        self._told: set[str] = set()

    def around(self, env: EnvironmentBase, *, episode_id: str) -> EnvironmentBase:
        """Returns `env` in a wrapper that takes snapshots by this schedule."""
        from ares_exp.snapshots.snapshotting_environment import SnapshottingEnvironment

        return SnapshottingEnvironment(env, self, episode_id=episode_id)

    def due(self, step_count: int) -> bool:
        """Returns whether a snapshot must be taken after this number of applied responses."""
        return self._every is not None and step_count % self._every == 0

    def surplus(self, snapshot_ids: list[str]) -> list[str]:
        """Returns the ids of an episode's oldest snapshots, which exceed the number of snapshots to keep."""
        return snapshot_ids[: -self._keep] if self._keep is not None else []

    def is_success(self, reward: float | None) -> bool:
        """Returns whether `reward` is at least `success_reward`, so that the episode's snapshots must be deleted."""
        return self._success_reward is not None and reward is not None and reward >= self._success_reward

    def delete(self, snapshot_id: str) -> None:
        """Deletes a snapshot from the store. Its objects remain until `collect_garbage`. Blocking."""
        self._has_garbage = True
        self._store.delete(snapshot_id)

    def collect_garbage(self) -> None:
        """Removes the objects that only deleted or failed snapshots needed, if the option `gc` is set. Blocking."""
        if self._gc and self._has_garbage:
            freed = self._store.gc(grace_sec=0.0)  # safe: writers hold the lock until their snapshot is committed
            if freed.skipped is not None:
                logger.warning("%s", freed.skipped)

    def report(self, what: str, error: Exception) -> None:
        """Logs that a snapshot could not be taken or deleted. `what` is the subject of the message.

        Only the first failure with the same cause is a warning, because on a full disk every snapshot fails.
        """
        self._has_garbage = True
        words = (word for word in str(error).split() if word.isalpha())  # no names, paths or numbers
        cause = f"{type(error).__name__}: {' '.join(words)}"
        level = logging.INFO if cause in self._told else logging.WARNING
        self._told.add(cause)
        logger.log(level, "%s: %s: %s", what, type(error).__name__, error)
