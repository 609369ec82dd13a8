"""The `snapshot` group: when a run takes snapshots of its episodes, and which of them it keeps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.environment import EnvironmentBase

logger = logging.getLogger(__name__)


class NoSnapshots:
    """`snapshot=none`: episodes are run as they are."""

    output_dir: Path | None = None
    is_only_to_continue: bool = False

    def around(self, env: EnvironmentBase, *, episode_id: str) -> EnvironmentBase:
        """`env` itself."""
        return env

    def collect_garbage(self) -> None:
        """There is none."""


class SnapshotSchedule:
    """Takes snapshots at every n-th step of every episode of a run; those that are not to be kept are deleted again.

    Attributes:
        output_dir: The snapshot store that they go to.
        timeout_sec: Bound on one snapshot, seconds.
        is_only_to_continue: Whether its snapshots are of use only if episodes can continue from them.
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
        """Keeps the options; touches nothing.

        Args:
            output_dir: The snapshot store; made with the first snapshot.
            every: A snapshot is due while the environment waits for an action and so many responses more were applied:
                1 is every step, 5 is steps 0, 5, 10, …; `None`: only when one is asked for.
            keep: The last so many of each episode are kept; `None`: all.
            success_reward: An episode whose LAST step has at least this reward loses its snapshots; `None`: none does.
            timeout_sec: A snapshot that takes longer is cancelled, reported and counted as failed.
            gc: Whether what deleted snapshots leave in the store is removed at the end of the run; `False` where
                several runs write to one store.
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
        """`env` with snapshots."""
        from ares_exp.snapshots.snapshotting_environment import SnapshottingEnvironment

        return SnapshottingEnvironment(env, self, episode_id=episode_id)

    def due(self, step_count: int) -> bool:
        """Whether a snapshot is taken after so many applied responses."""
        return self._every is not None and step_count % self._every == 0

    def surplus(self, snapshot_ids: list[str]) -> list[str]:
        """Those of an episode that goes on, or has failed, that are not kept."""
        return snapshot_ids[: -self._keep] if self._keep is not None else []

    def is_success(self, reward: float | None) -> bool:
        """Whether an episode that ended with this reward loses its snapshots."""
        return self._success_reward is not None and reward is not None and reward >= self._success_reward

    def delete(self, snapshot_id: str) -> None:
        """Deletes one of the snapshots. Blocks."""
        self._has_garbage = True
        self._store.delete(snapshot_id)

    def collect_garbage(self) -> None:
        """Removes what only deleted and failed snapshots held, unless it is to stay. Blocks."""
        if self._gc and self._has_garbage:
            freed = self._store.gc(grace_sec=0.0)  # whoever puts something holds the store's lock until it is needed
            if freed.skipped is not None:
                logger.warning("%s", freed.skipped)

    def report(self, what: str, error: Exception) -> None:
        """Warns of a failure: of every cause once, as a full disk fails every snapshot there is."""
        self._has_garbage = True
        words = (word for word in str(error).split() if word.isalpha())  # neither names nor paths nor numbers
        cause = f"{type(error).__name__}: {' '.join(words)}"
        level = logging.INFO if cause in self._told else logging.WARNING
        self._told.add(cause)
        logger.log(level, "%s: %s: %s", what, type(error).__name__, error)
