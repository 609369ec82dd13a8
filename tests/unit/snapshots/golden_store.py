"""Writes the golden store of the current schema, once for each: `python -m tests.unit.snapshots.golden_store`."""

from pathlib import Path

from ares_exp.snapshots.snapshot import SCHEMA
from ares_exp.snapshots.store import LOCK_FILE, SnapshotStore
from tests.unit.snapshots.stores import add

GOLDEN = Path(__file__).parent / "golden" / "_".join(("schema", *map(str, SCHEMA)))

if __name__ == "__main__":
    store = SnapshotStore(GOLDEN)
    for step in (0, 3):
        add(store, step=step)
    (store.path / LOCK_FILE).unlink()
