"""kill -9 at any moment leaves only complete snapshots visible, and `gc` cleans the rest."""

import subprocess
import sys
from pathlib import Path

import pytest

from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.snapshots.store import SnapshotStore

KILLS = 60


@pytest.mark.once
def test_only_complete_snapshots_are_visible(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    subprocess.run(
        [sys.executable, "-m", "tests.unit.snapshots.killed_writers", store.path, str(KILLS)],
        check=True, timeout=100, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    problems: list[str] = []
    snapshots = store.list(problems=problems)
    assert problems == []
    assert len(snapshots) > KILLS / 2
    assert len({snapshot.snapshot_id.partition("@")[0] for snapshot in snapshots}) > KILLS / 2
    assert {store.verify(snapshot.snapshot_id).problems for snapshot in snapshots} == {()}
    needed = {digest for snapshot in snapshots for digest in snapshot.objects()}
    for snapshot in snapshots:
        for entry in get_delta(store.objects, snapshot.filesystem).entries.values():
            needed.update(chunk for chunk in entry.chunks if chunk is not None)
    assert needed < {*store.objects.digests()}  # what was on its way, or of removed ones
    assert store.gc(grace_sec=0).skipped is None
    assert {*store.objects.digests()} == needed
    assert not [*store.path.glob(".tmp-*")]
    assert not [*(store.path / "objects" / "tmp").iterdir()]
    assert [*store.list()] == [*snapshots]
