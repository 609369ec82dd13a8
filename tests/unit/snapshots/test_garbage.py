"""The collection of garbage: what a snapshot needs stays, and nothing is removed under the hands of a writer."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from ares_exp.errors import SnapshotError
from ares_exp.snapshots.garbage import RemovedObjects
from ares_exp.snapshots.store import SnapshotStore
from tests.unit.snapshots.stores import EPISODE, add, make, remove_all_but


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store")


def test_what_only_a_removed_snapshot_needed_goes(store: SnapshotStore) -> None:
    for step in range(4):
        add(store, step=step)
    before = {*store.objects.digests()}
    store.delete(f"{EPISODE}@1")
    store.delete(f"{EPISODE}@2")
    freed = store.gc(grace_sec=0)
    gone = before - {*store.objects.digests()}
    assert (freed.objects, freed.skipped) == (len(gone), None)
    assert freed.objects >= 6  # of either the state, the conversation, the journal, log.txt and the delta
    assert freed.bytes > 0
    assert [store.verify(name).problems for name in store.ids()] == [(), ()]
    assert store.gc(grace_sec=0) == RemovedObjects()


def test_what_was_written_just_now_stays(store: SnapshotStore) -> None:
    add(store, step=1)
    orphan = store.objects.put(b"on its way")
    (store.path / ".tmp-now").mkdir()
    assert store.gc() == RemovedObjects()
    assert store.objects.file(orphan).exists()
    assert (store.path / ".tmp-now").is_dir()


def test_what_killed_processes_left_goes(store: SnapshotStore) -> None:
    add(store, step=1)
    orphan = store.objects.put(b"nobody's")
    leftovers = [store.path / ".tmp-1", store.objects.path / "objects" / "tmp" / "abc"]
    leftovers[0].mkdir()
    (leftovers[0] / "snapshot.json").write_text("{")
    leftovers[1].write_bytes(b"half an obj")
    long_ago = time.time() - 7200
    for path in (*leftovers, store.objects.file(orphan)):
        os.utime(path, (long_ago, long_ago))
    size = store.objects.size(orphan)
    assert store.gc(dry_run=True) == RemovedObjects(1, size, 1)
    assert store.objects.file(orphan).exists()
    assert leftovers[0].is_dir()
    assert store.gc() == RemovedObjects(1, size, 1)
    assert not store.objects.file(orphan).exists()
    assert not any(path.exists() for path in leftovers)
    assert store.verify(f"{EPISODE}@1").ok


def test_a_dry_run_tells_what_removing_snapshots_would_free(store: SnapshotStore) -> None:
    for step in range(3):
        add(store, step=step)
    doomed = store.beyond(EPISODE, 1)
    planned = store.gc(grace_sec=0, dry_run=True, without=doomed)
    remove_all_but(store, EPISODE, 1)
    assert planned.objects > 0
    assert store.gc(grace_sec=0) == planned


@pytest.mark.parametrize("kind", ["metadata", "version", "delta"])
def test_nothing_goes_while_nobody_knows_what_is_needed(store: SnapshotStore, kind: str) -> None:
    snapshot = add(store, step=1)
    path = snapshot.snapshot_dir / "snapshot.json"
    if kind == "metadata":
        path.write_text("{")
    elif kind == "version":
        path.write_text(path.read_text().replace('"schema": [\n  1', '"schema": [\n  2'))
    else:
        store.objects.file(snapshot.filesystem[-1]).write_bytes(b"")
    add(store, step=2)
    before = {*store.objects.digests()}
    with pytest.raises(SnapshotError, match=f"Repair or remove {snapshot.snapshot_dir}"):
        store.gc(grace_sec=0)
    assert {*store.objects.digests()} == before
    store.delete(snapshot.snapshot_id)
    assert store.gc(grace_sec=0).objects > 0
    assert store.verify(f"{EPISODE}@2").ok


def test_a_snapshot_that_is_being_written_is_left_alone(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ares_exp.snapshots.garbage.COLLECTOR_WAITS_SEC", 0.01)
    with store.writing():
        snapshot = make(store, step=1)
        freed = SnapshotStore(store.path).gc(grace_sec=0)
        assert freed.skipped == f"Nothing was removed from {store.path}: a snapshot is being written. Try again later."
        store.commit(snapshot)
    assert store.verify(snapshot.snapshot_id).ok
    assert store.gc(grace_sec=0) == RemovedObjects()


def write_and_remove(path: Path, writer: int) -> None:
    store = SnapshotStore(path)
    for step in range(12):
        add(store, f"{writer}@{step}", step)
        remove_all_but(store, str(writer), 2)


@pytest.mark.once
@pytest.mark.slow
def test_writers_and_a_collector_at_the_same_time(store: SnapshotStore) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_and_remove, args=(store.path, number)) for number in range(2)]
    for process in writers:
        process.start()
    try:
        while any(process.is_alive() for process in writers):
            store.gc(grace_sec=0)
    finally:
        for process in writers:
            process.join(60)
    assert [process.exitcode for process in writers] == [0, 0]
    assert store.gc(grace_sec=0).skipped is None
    assert [*store.ids()] == [f"{number}@{step}" for number in range(2) for step in (10, 11)]
    assert [store.verify(name).problems for name in store.ids()] == [()] * 4
