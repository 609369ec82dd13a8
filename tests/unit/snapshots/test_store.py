"""The snapshot store: what is committed is there, whole; nothing else is seen."""

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ares_exp.errors import SnapshotError, SnapshotMetadataError, SnapshotNotFoundError
from ares_exp.snapshots.snapshot import EnvironmentSnapshot, check_id, new_id
from ares_exp.snapshots.store import SnapshotStore
from tests.unit.snapshots.stores import EPISODE, add, make


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "run" / "snapshots")


@pytest.mark.parametrize("sync", [False, True])
def test_committed_snapshot_is_complete(store: SnapshotStore, sync: bool) -> None:
    with store.writing():
        snapshot = store.commit(make(store, step=3), sync=sync)
    assert snapshot.snapshot_dir == store.path / f"{EPISODE}@3"
    assert store.get(f"{EPISODE}@3") == snapshot
    assert EnvironmentSnapshot.load_from_file(snapshot.snapshot_dir) == snapshot
    assert [*store.list()] == [snapshot]
    assert store.verify(f"{EPISODE}@3").ok
    assert sorted(path.name for path in store.path.iterdir()) == [".lock", f"{EPISODE}@3", "objects"]


def test_opening_a_store_creates_no_files(store: SnapshotStore) -> None:
    assert [*store.ids()] == []
    assert [*store.list()] == []
    assert store.gc().objects == 0
    assert not store.path.parent.exists()


def test_existing_id_is_refused(store: SnapshotStore) -> None:
    first = add(store, "one", step=1)
    with pytest.raises(SnapshotError, match=f"Cannot write the snapshot, because {store.path}/one already exists"):
        add(store, "one", step=2)
    assert store.get("one") == first


def test_one_of_several_writers_gets_the_id(store: SnapshotStore) -> None:
    def commit(step: int) -> int | None:
        other = SnapshotStore(store.path)
        try:
            with other.writing():
                return other.commit(make(other, "one", step)).step_count
        except SnapshotError:
            return None

    with ThreadPoolExecutor(8) as pool:
        steps = [step for step in pool.map(commit, range(24)) if step is not None]
    assert steps == [store.get("one").step_count]
    assert not [*store.path.glob(".tmp-*")]


def test_snapshot_without_its_objects_is_refused(store: SnapshotStore) -> None:
    snapshot = make(store, step=2)
    store.objects.file(snapshot.journal[0]).unlink()
    with pytest.raises(SnapshotError, match=f"its object {snapshot.journal[0]} is not in the store"):
        store.commit(snapshot)
    assert [*store.ids()] == []


def test_unreadable_metadata_is_not_committed(store: SnapshotStore) -> None:
    with pytest.raises(SnapshotMetadataError, match="`step_count` to be greater than or equal to 0, got -1"):
        add(store, step_count=-1)
    with pytest.raises(SnapshotMetadataError, match="NaN"):
        add(store, episode={"cost": float("nan")})
    assert [*store.ids()] == []
    assert not [*store.path.glob(".tmp-*")]


def test_unwritable_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = SnapshotStore(tmp_path / "file" / "store")
    with pytest.raises(SnapshotError, match=f"Cannot write in {tmp_path}/file"), store.writing():
        pass


IDS = [f"{EPISODE}@7", "a", "-x", "20260131-120000-00ff00ff", "x.y", "A" * 200]
NO_IDS = ["", ".", "..", ".tmp-1", "a/b", "../a", "/a", "objects", "a\0", "a\n", "a b", "ä", "A" * 201, "a\x1b[2J"]


@pytest.mark.parametrize("name", IDS)
def test_valid_ids_are_accepted(store: SnapshotStore, name: str) -> None:
    assert check_id(name) == name
    add(store, name)
    assert [*store.ids()] == [name]


@pytest.mark.parametrize("name", NO_IDS)
def test_invalid_ids_are_refused(store: SnapshotStore, name: str) -> None:
    for use in (check_id, store.get, store.delete, lambda name: add(store, name)):
        with pytest.raises(SnapshotMetadataError, match="the id of a snapshot to be a plain file name") as told:
            use(name)
        assert str(told.value).isprintable()
    assert not store.path.exists() or [*store.ids()] == []


def test_new_ids_are_unique_and_contain_the_time() -> None:
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", check_id(name)) for name in ids)


def test_unknown_id_suggests_existing_ones(store: SnapshotStore) -> None:
    with pytest.raises(SnapshotNotFoundError, match="the store is empty"):
        store.get("x")
    add(store, step=1)
    (store.path / "odd\nname").mkdir()
    with pytest.raises(SnapshotNotFoundError, match=rf"the store has other snapshots \(1\), such as {EPISODE}@1\."):
        store.get(f"{EPISODE}@2")


def test_list_is_in_order_of_time(store: SnapshotStore) -> None:
    times = {"b": "2026-01-31T12:00:00+00:00", "a": "2026-01-31T12:00:00.000001+00:00", "c": "2025-12-31T12:00:00Z"}
    for name, created_at in times.items():
        add(store, name, created_at=created_at)
    assert [snapshot.snapshot_id for snapshot in store.list()] == ["c", "b", "a"]


def test_broken_snapshots_are_reported_and_the_rest_listed(store: SnapshotStore, tmp_path: Path) -> None:
    for step in range(5):
        add(store, step=step)
    names = [*store.ids()]
    (store.path / names[0] / "snapshot.json").write_text("{")
    (store.path / names[1] / "snapshot.json").unlink()
    (store.path / names[2]).rename(store.path / "renamed")
    (store.path / names[3]).rename(tmp_path / "outside")
    (store.path / names[3]).symlink_to(tmp_path / "outside")
    (store.path / "a note.txt").write_text("not a snapshot")
    problems: list[str] = []
    assert [snapshot.snapshot_id for snapshot in store.list(problems=problems)] == [names[4]]
    told = ["line 1", "no snapshot at", "got a link", "to be the name of its directory"]
    assert [words in problem for words, problem in zip(told, problems, strict=True)] == [True] * 4
    assert [snapshot.snapshot_id for snapshot in store.list()] == [names[4]]


@pytest.mark.parametrize("broken", [False, True])
def test_delete_removes_a_snapshot(store: SnapshotStore, broken: bool) -> None:
    add(store, step=1)
    kept = add(store, step=2)
    if broken:
        (store.path / f"{EPISODE}@1" / "snapshot.json").write_text("")
    store.delete(f"{EPISODE}@1")
    assert [*store.list()] == [kept]
    assert not [*store.path.glob(".tmp-*")]
    with pytest.raises(SnapshotNotFoundError, match=rf"the store has other snapshots \(1\), such as {EPISODE}@2"):
        store.delete(f"{EPISODE}@1")


def test_deleting_a_link_preserves_its_target(store: SnapshotStore, tmp_path: Path) -> None:
    add(store, step=1)
    (tmp_path / "precious").mkdir()
    (store.path / "link").symlink_to(tmp_path / "precious")
    store.delete("link")
    assert (tmp_path / "precious").is_dir()
    assert [*store.ids()] == [f"{EPISODE}@1"]


def test_beyond_lists_all_but_last_steps(store: SnapshotStore) -> None:
    for step in (2, 9, 10, 11):
        add(store, step=step)
    for name in (f"{EPISODE}@later", f"{EPISODE}", f"x{EPISODE}@1", f"{EPISODE}x@1"):
        add(store, name)
    assert [store.beyond(EPISODE, keep) for keep in (2, 4)] == [[f"{EPISODE}@2", f"{EPISODE}@9"], []]


def test_file_permissions_follow_the_umask(store: SnapshotStore) -> None:
    path = add(store).snapshot_dir / "snapshot.json"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_foreign_write_error_is_not_blamed_on_store(store: SnapshotStore) -> None:
    with pytest.raises(OSError, match="elsewhere"), store.writing():
        raise OSError("elsewhere")


def test_linked_lock_is_not_followed(store: SnapshotStore, tmp_path: Path) -> None:
    store.path.mkdir(parents=True)
    (store.path / ".lock").symlink_to(tmp_path / "made")
    with pytest.raises(SnapshotError, match=r"Cannot write in .*/\.lock"), store.writing():
        pass
    with pytest.raises(SnapshotError, match=r"Cannot collect garbage in .*/\.lock"):
        store.gc()
    assert not (tmp_path / "made").exists()
