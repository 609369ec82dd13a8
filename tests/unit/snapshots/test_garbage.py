"""Garbage collection and verification of stored snapshots."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES
from ares_exp.containers.filesystem.zstd import zstd
from ares_exp.errors import SnapshotError
from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.snapshots.store import RemovedObjects, SnapshotStore
from tests.unit.snapshots.stores import EPISODE, add, changes, file, make, remove_all_but


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store")


def test_objects_of_a_removed_snapshot_are_deleted(store: SnapshotStore) -> None:
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


def test_recent_files_are_kept(store: SnapshotStore) -> None:
    add(store, step=1)
    orphan = store.objects.put(b"on its way")
    (store.path / ".tmp-now").mkdir()
    assert store.gc() == RemovedObjects()
    assert store.objects.file(orphan).exists()
    assert (store.path / ".tmp-now").is_dir()


def test_leftovers_of_killed_processes_are_deleted(store: SnapshotStore) -> None:
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


def test_dry_run_reports_the_freed_space(store: SnapshotStore) -> None:
    for step in range(3):
        add(store, step=step)
    doomed = store.beyond(EPISODE, 1)
    planned = store.gc(grace_sec=0, dry_run=True, without=doomed)
    remove_all_but(store, EPISODE, 1)
    assert planned.objects > 0
    assert store.gc(grace_sec=0) == planned


@pytest.mark.parametrize("kind", ["metadata", "version", "delta"])
def test_unreadable_snapshot_prevents_collection(store: SnapshotStore, kind: str) -> None:
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


def test_snapshot_being_written_prevents_collection(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ares_exp.snapshots.store.COLLECTOR_WAITS_SEC", 0.01)
    with store.writing():
        snapshot = make(store, step=1)
        freed = SnapshotStore(store.path).gc(grace_sec=0)
        assert freed.skipped == f"Nothing was removed from {store.path}: a snapshot is being written. Try again later."
        store.commit(snapshot)
    assert store.verify(snapshot.snapshot_id).ok
    assert store.gc(grace_sec=0) == RemovedObjects()


def chunk_of(snapshot: EnvironmentSnapshot) -> str:
    [chunk] = get_delta(snapshot.object_store, snapshot.filesystem).entries["/app/log.txt"].chunks
    assert chunk is not None
    return chunk


def test_complete_snapshot_is_ok(store: SnapshotStore) -> None:
    snapshot = add(store, step=3)
    found = store.verify(snapshot.snapshot_id)
    assert (found.ok, found.problems, found.snapshot_id) == (True, (), snapshot.snapshot_id)
    assert found.objects == len(snapshot.objects()) + 3  # two chunks of large.bin, one of log.txt
    assert found.bytes == sum(map(store.objects.size, store.objects.digests()))


NAMED: list[tuple[str, Callable[[EnvironmentSnapshot], str]]] = [
    ("journal", lambda snapshot: snapshot.journal[0]),
    ("messages", lambda snapshot: snapshot.message_objects[0]),
    ("delta", lambda snapshot: snapshot.filesystem[-1]),
    ("state", lambda snapshot: str(snapshot.agent["state"])),
    ("chunk", chunk_of),
]


@pytest.mark.parametrize(("what", "digest_of"), NAMED)
def test_missing_object_is_found(
    store: SnapshotStore, what: str, digest_of: Callable[[EnvironmentSnapshot], str]
) -> None:
    path = store.objects.file(digest_of(add(store, step=3)))
    path.unlink()
    for deep in (False, True):
        found = store.verify(f"{EPISODE}@3", deep=deep)
        assert not found.ok
        assert any(f"{path} is missing" in problem for problem in found.problems), what


@pytest.mark.parametrize(("what", "digest_of"), NAMED)
def test_changed_object_is_found(
    store: SnapshotStore, what: str, digest_of: Callable[[EnvironmentSnapshot], str]
) -> None:
    path = store.objects.file(digest_of(add(store, step=3)))
    path.write_bytes(zstd.compress(b'{"other": 1}\n'))
    found = store.verify(f"{EPISODE}@3")
    assert any(f"{path} is damaged" in problem for problem in found.problems), what
    assert store.verify(f"{EPISODE}@3", deep=False).ok is (what == "chunk")


@pytest.mark.parametrize(
    ("name", "value"),
    [("journal_entries", 7), ("filesystem_entries", 4), ("filesystem_bytes", 1), ("filesystem_base", "sha256:other")],
)
def test_inconsistent_metadata_is_found(store: SnapshotStore, name: str, value: object) -> None:
    snapshot = add(store, step=3, **{name: value})
    [problem] = store.verify(snapshot.snapshot_id).problems
    assert problem.startswith(f"{snapshot.snapshot_dir}/snapshot.json: `{name}` is {value!r}, but the stored data ")


def test_chunk_of_wrong_length_is_found(store: SnapshotStore) -> None:
    log = file(store.objects, b"x" * 10)
    short = store.objects.put(b"x" * 9)
    entries = {**changes(store.objects, 3), "/app/log.txt": type(log)("file", size=10, chunks=(short,))}
    add(store, step=3, entries=entries)
    [problem] = store.verify(f"{EPISODE}@3").problems
    assert problem.endswith("to contain 10 bytes of a file, got 9.")


def test_compression_bomb_is_found(store: SnapshotStore) -> None:
    bomb = store.objects.put(b"\0" * (CHUNK_BYTES + 1))
    log = type(file(store.objects, b"x"))("file", size=CHUNK_BYTES, chunks=(bomb,))
    add(store, step=3, entries={"/app": changes(store.objects, 0)["/app"], "/app/log.txt": log})
    [problem] = store.verify(f"{EPISODE}@3").problems
    assert f"at most {CHUNK_BYTES} bytes" in problem


def test_invalid_journal_is_found(store: SnapshotStore) -> None:
    lines = store.objects.put_lines([b'{"t": "call"}', b"nonsense"])
    add(store, step=1, journal=lines, journal_entries=2)
    assert store.verify(f"{EPISODE}@1").problems == ("Line 1 of the journal is not valid JSON.",)


def test_unreadable_metadata_is_found(store: SnapshotStore) -> None:
    (add(store).snapshot_dir / "snapshot.json").write_text("[]")
    found = store.verify(f"{EPISODE}@0")
    assert (found.ok, found.objects) == (False, 0)
    assert "expected a JSON object" in found.problems[0]
    assert "There is no snapshot gone" in store.verify("gone").problems[0]
