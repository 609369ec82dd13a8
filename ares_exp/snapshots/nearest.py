"""The snapshot of an episode that is nearest to a step."""

from __future__ import annotations

from pathlib import Path

from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.snapshots.snapshot_id import step_of


def nearest_snapshot(store: Path, episode_id: str, step: int) -> EnvironmentSnapshot | None:
    """Returns the last snapshot of the episode that was taken at `step` or before; `None` without one. Blocking.

    Raises:
        SnapshotError: It cannot be read.
    """
    found = [step_of(path.name) for path in store.iterdir()] if store.is_dir() else []
    steps = [one[1] for one in found if one is not None and one[0] == episode_id and one[1] <= step]
    return EnvironmentSnapshot.load_from_file(store / f"{episode_id}@{max(steps)}") if steps else None
