"""Verification finds whatever is wrong with a snapshot's objects, and tells it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES
from ares_exp.containers.filesystem.zstd import zstd
from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.snapshots.store import SnapshotStore
from tests.unit.snapshots.stores import EPISODE, add, changes, file


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store")


def chunk_of(snapshot: EnvironmentSnapshot) -> str:
    """The digest of the only chunk of log.txt."""
    [chunk] = get_delta(snapshot.object_store, snapshot.filesystem).entries["/app/log.txt"].chunks
    assert chunk is not None
    return chunk


def test_a_whole_snapshot(store: SnapshotStore) -> None:
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
def test_a_missing_object(store: SnapshotStore, what: str, digest_of: Callable[[EnvironmentSnapshot], str]) -> None:
    path = store.objects.file(digest_of(add(store, step=3)))
    path.unlink()
    for deep in (False, True):
        found = store.verify(f"{EPISODE}@3", deep=deep)
        assert not found.ok
        assert any(f"{path} is missing" in problem for problem in found.problems), what


@pytest.mark.parametrize(("what", "digest_of"), NAMED)
def test_an_object_with_other_content(
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
def test_metadata_that_says_something_else(store: SnapshotStore, name: str, value: object) -> None:
    snapshot = add(store, step=3, **{name: value})
    [problem] = store.verify(snapshot.snapshot_id).problems
    assert problem.startswith(f"{snapshot.snapshot_dir}/snapshot.json: `{name}` is {value!r}, but the objects have ")


def test_a_chunk_of_another_length(store: SnapshotStore) -> None:
    log = file(store.objects, b"x" * 10)
    short = store.objects.put(b"x" * 9)
    entries = {**changes(store.objects, 3), "/app/log.txt": type(log)("file", size=10, chunks=(short,))}
    add(store, step=3, entries=entries)
    [problem] = store.verify(f"{EPISODE}@3").problems
    assert problem.endswith("to hold 10 bytes of a file, got 9.")


def test_a_chunk_that_is_a_bomb(store: SnapshotStore) -> None:
    bomb = store.objects.put(b"\0" * (CHUNK_BYTES + 1))
    log = type(file(store.objects, b"x"))("file", size=CHUNK_BYTES, chunks=(bomb,))
    add(store, step=3, entries={"/app": changes(store.objects, 0)["/app"], "/app/log.txt": log})
    [problem] = store.verify(f"{EPISODE}@3").problems
    assert f"at most {CHUNK_BYTES} bytes" in problem


def test_a_journal_that_is_none(store: SnapshotStore) -> None:
    lines = store.objects.put_lines([b'{"t": "call"}', b"nonsense"])
    add(store, step=1, journal=lines, journal_entries=2)
    assert store.verify(f"{EPISODE}@1").problems == ("Expected JSON in line 1 of the journal, got something else.",)


def test_metadata_that_cannot_be_read(store: SnapshotStore) -> None:
    (add(store).snapshot_dir / "snapshot.json").write_text("[]")
    found = store.verify(f"{EPISODE}@0")
    assert (found.ok, found.objects) == (False, 0)
    assert "expected a JSON object" in found.problems[0]
    assert "such as" in store.verify("gone").problems[0]
