"""Functions that find the snapshots that a command-line argument selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ares_exp.errors import SnapshotNotFoundError, UserError
from ares_exp.records.latest_run import MEANING
from ares_exp.records.run_dir import RunDir, is_file
from ares_exp.snapshots.snapshot import OBJECTS, SNAPSHOT_FILE, EnvironmentSnapshot
from ares_exp.snapshots.store import SnapshotStore

HELP = (
    "a run directory or a snapshot store, optionally followed by /ID or the start of an id, or a snapshot.json; "
    f"{MEANING}"
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A snapshot store, and the ids of the selected snapshots in it."""

    store: SnapshotStore
    ids: Sequence[str]


def chosen_snapshots(path: Path) -> Chosen:
    """Finds the snapshots that `path` selects. Returns their ids without reading the snapshots.

    Raises:
        UserError: `path` is not a snapshot, a snapshot store or a run directory with snapshots.
        SnapshotMetadataError: `path` is a file that does not contain a valid snapshot.
    """
    if is_file(path):
        snapshot = EnvironmentSnapshot.load_from_file(path)
        return Chosen(SnapshotStore(snapshot.snapshot_dir.parent), [snapshot.snapshot_id])
    if (path / SNAPSHOT_FILE).exists():
        return Chosen(SnapshotStore(path.parent), [path.name])
    if (store := find_store(path)) is not None:
        return Chosen(store, store.ids())
    if (store := find_store(path.parent)) is not None and (store.path == path.parent or not path.exists()):
        return Chosen(store, _by_prefix(store, path.name))
    raise UserError(
        f"Expected {path} to be a snapshot, a snapshot store or a run directory that contains `snapshots/`, "
        f"but {'it is none of these' if path.exists() else 'there is no such path'}."
    )


def find_store(path: Path) -> SnapshotStore | None:
    """Returns the store at `path` or in the run directory `path`; `None` if there is no store."""
    for candidate in (path, RunDir(path).snapshots):
        if (candidate / OBJECTS).is_dir():
            return SnapshotStore(candidate)
    return None


def _by_prefix(store: SnapshotStore, prefix: str) -> Sequence[str]:
    ids = store.ids()
    if prefix in ids:
        return [prefix]
    if found := [name for name in ids if name.startswith(prefix)]:
        return found
    raise SnapshotNotFoundError(store.not_found(prefix))


def chosen_snapshot(path: Path) -> EnvironmentSnapshot:
    """Reads the snapshot that `path` selects. Raises `UserError` if it selects several, or like `chosen_snapshots`."""
    chosen = chosen_snapshots(path)
    if len(chosen.ids) == 1:
        return chosen.store.get(chosen.ids[0])
    if not chosen.ids:
        raise UserError(f"There is no snapshot in {chosen.store.path}.")
    raise UserError(
        f"Expected one snapshot, found {len(chosen.ids)} in {path}. Name one, such as {path}/{chosen.ids[-1]}. "
        f"`ares-exp snapshots list {path}` lists them."
        if path.exists()
        else f"Expected one snapshot, found {len(chosen.ids)} whose id starts with {path.name}: "
        f"{', '.join(chosen.ids[:3])}, …. Name one."
    )
