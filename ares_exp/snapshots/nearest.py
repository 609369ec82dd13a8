"""The snapshot of an episode that is nearest to a step."""

from __future__ import annotations

from pathlib import Path

from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.snapshots.snapshot_id import step_of


def nearest_snapshot(store: Path, episode_id: str, step: int) -> EnvironmentSnapshot | None:
    """Returns the last snapshot of the episode that was taken at `step` or before; `None` without one. Blocking.

    One from which no episode can go on, as it has the container's files alone, is none.

    Raises:
        SnapshotError: It cannot be read.
    """
    found = [step_of(path.name) for path in store.iterdir()] if store.is_dir() else []
    steps = [one[1] for one in found if one is not None and one[0] == episode_id and one[1] <= step]
    if not steps:
        return None
    nearest = EnvironmentSnapshot.load_from_file(store / f"{episode_id}@{max(steps)}")
    return nearest if nearest.is_restorable else None
