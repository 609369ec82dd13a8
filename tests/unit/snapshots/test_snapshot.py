"""`EnvironmentSnapshot`: its JSON, its files, and what is refused of both."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import (
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMetadataError,
    SnapshotNotFoundError,
    SnapshotVersionError,
)
from ares_exp.records.secrets import protect
from ares_exp.snapshots.snapshot import MAX_FILE_BYTES, EnvironmentSnapshot, with_checksum
from ares_exp.snapshots.store import SnapshotStore
from tests.unit.snapshots.golden_store import GOLDEN
from tests.unit.snapshots.stores import EPISODE, add, make


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store")


def rewritten(store: SnapshotStore, change: Callable[[dict[str, Any]], object]) -> Path:
    """The file of a snapshot whose JSON somebody has changed, its checksum included where the schema is one."""
    path = add(store, step=3).snapshot_dir / "snapshot.json"
    data = json.loads(path.read_text())
    change(data)
    is_schema = isinstance(data["schema"], list) and {*map(type, data["schema"])} == {int}
    path.write_text(json.dumps(with_checksum(data) if is_schema else data))
    return path


def test_snapshot_round_trips(store: SnapshotStore) -> None:
    snapshot = add(store, step=3)
    again = EnvironmentSnapshot.from_dict(snapshot.to_dict(), where="here", snapshot_dir=snapshot.snapshot_dir)
    assert again == snapshot
    assert EnvironmentSnapshot.load_from_file(snapshot.snapshot_dir) == snapshot
    assert EnvironmentSnapshot.load_from_file(str(snapshot.snapshot_dir / "snapshot.json")) == snapshot
    assert snapshot.requires_reset is False
    assert snapshot.schema == (1, 1)


def test_invalid_messages_are_refused(store: SnapshotStore) -> None:
    lines = store.objects.put_lines([b'{"role": "user"}', b"[1]"])
    snapshot = add(store, message_objects=lines)
    with pytest.raises(SnapshotCorruptError, match="line 1 of `message_objects` is not a message"):
        _ = snapshot.agent_messages
    store.objects.file(lines[0]).unlink()
    with pytest.raises(SnapshotCorruptError, match="missing"):
        _ = snapshot.agent_messages


def test_copy_elsewhere_finds_its_objects(store: SnapshotStore, tmp_path: Path) -> None:
    snapshot = add(store, step=1)
    copy = tmp_path / "elsewhere" / "copy.json"
    snapshot.save_to_file(copy)
    assert EnvironmentSnapshot.load_from_file(copy) == snapshot
    assert len(EnvironmentSnapshot.load_from_file(copy).agent_messages) == 3
    snapshot.save_to_file(str(tmp_path))
    assert EnvironmentSnapshot.load_from_file(tmp_path) == snapshot


def test_moved_store_needs_no_correction(store: SnapshotStore, tmp_path: Path) -> None:
    snapshot = add(store, step=1)
    moved = store.path.rename(tmp_path / "moved") / snapshot.snapshot_id
    assert EnvironmentSnapshot.load_from_file(moved) == replace(snapshot, snapshot_dir=moved)
    assert len(EnvironmentSnapshot.load_from_file(moved).agent_messages) == 3


def test_stored_snapshot_does_not_contain_its_path(store: SnapshotStore) -> None:
    path = rewritten(store, lambda data: data.update(snapshot_dir="/etc/ssh/x"))
    assert EnvironmentSnapshot.load_from_file(path).snapshot_dir == path.parent
    assert store.get(path.parent.name).snapshot_dir == path.parent
    assert "snapshot_dir" not in EnvironmentSnapshot.load_from_file(path).to_dict()


def test_save_to_own_path_overwrites_the_file(store: SnapshotStore) -> None:
    snapshot = replace(add(store), episode={"label": "the good one"})
    snapshot.save_to_file(snapshot.snapshot_dir)
    assert store.get(snapshot.snapshot_id) == snapshot
    assert "snapshot_dir" not in json.loads((snapshot.snapshot_dir / "snapshot.json").read_text())


def test_unwritable_file_is_named(store: SnapshotStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match=f"{tmp_path}/file/x.json: "):
        add(store).save_to_file(tmp_path / "file" / "x.json")


def test_too_large_metadata_is_not_written(store: SnapshotStore, tmp_path: Path) -> None:
    snapshot = make(store, episode={"log": "x" * MAX_FILE_BYTES})
    with pytest.raises(SnapshotError, match="expected at most 8,388,608 bytes of metadata, got 8,"):
        snapshot.save_to_file(tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_digest_depends_on_the_content(store: SnapshotStore) -> None:
    snapshot = make(store, step=2)
    same = replace(snapshot, snapshot_id="other", created_at="2027-01-01T00:00:00+00:00", lineage={"branch": 7})
    assert same.digest == snapshot.digest
    assert replace(snapshot, step_count=3).digest != snapshot.digest
    assert replace(snapshot, filesystem=()).digest != snapshot.digest
    assert snapshot.digest.startswith("sha256:")


def test_objects_are_all_named_digests(store: SnapshotStore) -> None:
    snapshot = make(store, step=2)
    named = {*snapshot.journal, *snapshot.message_objects, *snapshot.filesystem, snapshot.agent["state"]}
    assert set(snapshot.objects()) == named
    assert len(snapshot.objects()) == len(named)
    assert make(store, agent={"state": None}, journal=(), message_objects=(), filesystem=()).objects() == ()


def test_secrets_are_masked(store: SnapshotStore) -> None:
    protect(["hunter2-is-no-password"])
    snapshot = add(store, container={"options": {"login": "me:hunter2-is-no-password"}})
    assert "hunter2" not in (snapshot.snapshot_dir / "snapshot.json").read_text()
    assert snapshot.container["options"] == {"login": "me:***"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("step_count", 1), ("step_limit", 500), ("message_objects", []), ("episode", {"tokens": 0}), ("mood", "sunny")],
)
def test_changed_value_is_refused(store: SnapshotStore, name: str, value: object) -> None:
    snapshot = add(store, step=3)
    path = snapshot.snapshot_dir / "snapshot.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(SnapshotCorruptError, match="does not match the `checksum`, so the file was changed or damaged"):
        EnvironmentSnapshot.load_from_file(path)
    [problem] = store.verify(snapshot.snapshot_id).problems
    assert problem.startswith(f"{path}: the content does not match the `checksum`")


def test_document_without_checksum_is_rejected(store: SnapshotStore) -> None:
    path = add(store, step=3).snapshot_dir / "snapshot.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in data.items() if name != "checksum"}))
    with pytest.raises(SnapshotMetadataError, match="`checksum`"):
        EnvironmentSnapshot.load_from_file(path)


@pytest.mark.parametrize("schema", [[1, 0], [1, 2], [2, 0], [2, 1]])
def test_snapshot_of_another_version_is_rejected(store: SnapshotStore, schema: list[int]) -> None:
    path = rewritten(store, lambda data: data.update(schema=schema))
    expected = re.escape(f"expected `schema` [1, 1], got {schema}. Use the version of ares_exp")
    with pytest.raises(SnapshotVersionError, match=expected):
        EnvironmentSnapshot.load_from_file(path)


WRONG = [
    ("schema", None), ("schema", [1]), ("schema", [True, 0]), ("schema", [0, 1]), ("schema", [1, -1]),
    ("schema", "1.0"),
    ("snapshot_id", "../../etc"), ("snapshot_id", "objects"), ("snapshot_id", ".hidden"), ("snapshot_id", "a\nb"),
    ("snapshot_id", ""), ("snapshot_id", "x" * 201), ("snapshot_id", 7), ("snapshot_id", "a b"), ("snapshot_id", "ä"),
    ("created_at", "yesterday"), ("created_at", "2026-01-31T12:00:00"), ("created_at", "2026-01-31T12:00:00+01:00"),
    ("created_at", "2026-01-31"), ("created_at", 1e9),
    ("step_count", -1), ("step_count", True), ("step_count", 2**63), ("step_count", 1.0), ("step_count", None),
    ("step_limit", -1), ("step_limit", "50"),
    ("task_type", None), ("task_data", []), ("container_type", 3), ("container_image", 3),
    ("container_dockerfile_path", ["x"]), ("container_resources", None), ("container_resources", {"cpus": "2"}),
    ("time_step", {}), ("time_step", {"step_type": "LAST", "reward": None, "discount": None}),
    ("time_step", {"step_type": "MID", "reward": "0", "discount": 1.0}),
    ("time_step", {"step_type": "MID", "reward": 0}),
    ("message_objects", ["ab"]), ("message_objects", ["../" + "a" * 61]), ("message_objects", {"a": 1}),
    ("journal", ["A" * 64]), ("journal", "a" * 64), ("journal", [None]), ("journal_entries", -3),
    ("filesystem", ["a" * 63 + "\n"]), ("filesystem", ["a" * 64 + "\n"]), ("filesystem_base", None),
    ("filesystem_entries", "1"), ("filesystem_bytes", 1e300),
    ("container", []), ("container", {"env_names": {"A": "b"}}), ("container", {"not_captured": [1]}),
    ("container", {"processes": "ps"}), ("container", {"workdir": 1}), ("container", {"options": None}),
    ("agent", None), ("agent", {"state": "x"}), ("agent", {"state_version": -1}), ("agent", {"factory": None}),
    ("episode", 1), ("lineage", "root"), ("writer", None), ("requires_reset", True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_field_is_named(name: str, value: object) -> None:
    data = SnapshotStore(GOLDEN).get(f"{EPISODE}@3").to_dict() | {name: value}
    name_in_message = "id of a snapshot" if name == "snapshot_id" and isinstance(value, str) else name
    with pytest.raises(SnapshotMetadataError, match=name_in_message) as told:
        EnvironmentSnapshot.from_dict(with_checksum(data), where="here", snapshot_dir=GOLDEN)
    assert str(told.value).startswith("here: ")
    assert len(str(told.value)) < 500


def test_missing_field_is_named(store: SnapshotStore) -> None:
    data = add(store, step=1).to_dict()
    for name in data:
        rest = {key: value for key, value in data.items() if key != name}
        with pytest.raises(SnapshotMetadataError, match=f"^here: .*`{name}`"):
            EnvironmentSnapshot.from_dict(rest, where="here", snapshot_dir=Path("x"))


@pytest.mark.parametrize("value", ["relative/path", "/a\0b", "/\ud800", None])
def test_copy_without_a_valid_path_is_refused(store: SnapshotStore, tmp_path: Path, value: object) -> None:
    data = add(store).to_dict() | {"snapshot_dir": value}
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps(data))
    with pytest.raises(SnapshotMetadataError, match="`snapshot_dir`"):
        EnvironmentSnapshot.load_from_file(copy)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "line 1, column 1"),
        (b'{\n "a": 1,\n "b": }', "line 3, column 7"),
        (b"[]", r"expected a JSON object, got \[\]"),
        (b"\xff\xfe\xfd", "invalid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "the JSON has more than 64 levels of nesting in `a`"),
        (b'{"episode": {"cost": NaN}}', "NaN is not a valid JSON number"),
        (b'{"episode": {"cost": 1e999}}', "expected plain JSON, got inf in `episode`"),
        (b'{"step_count": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"step_count": ' + b"9" * 400 + b"}", "expected plain JSON, got 9+.*in `step_count`"),
        (b" " * (MAX_FILE_BYTES + 1), "the file has more than 8,388,608 bytes"),
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, text: bytes, told: str) -> None:
    path = tmp_path / "snapshot.json"
    path.write_bytes(text)
    with pytest.raises(SnapshotMetadataError, match=told) as error:
        EnvironmentSnapshot.load_from_file(tmp_path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 500


def test_path_without_a_snapshot_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone", tmp_path / "gone" / "snapshot.json"):
        with pytest.raises(SnapshotNotFoundError, match=str(path)):
            EnvironmentSnapshot.load_from_file(path)
    for bad, reason in ((tmp_path / ("x" * 300), "xxx: File name too long"), ("a\0b", "null")):
        with pytest.raises(SnapshotMetadataError, match=reason):
            EnvironmentSnapshot.load_from_file(bad)


def test_irregular_file_is_not_opened(store: SnapshotStore, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    path = add(store).snapshot_dir / "snapshot.json"
    for create, reason in (
        (os.mkfifo, "expected a regular file"),
        (lambda path: path.symlink_to(tmp_path / "secret.json"), "it is a link"),
        (Path.mkdir, "Is a directory"),
    ):
        path.unlink()
        create(path)
        with pytest.raises(SnapshotMetadataError, match=reason):
            store.get(f"{EPISODE}@0")


def test_store_is_not_a_snapshot(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    with pytest.raises(SnapshotNotFoundError, match="found a store of several snapshots"):
        EnvironmentSnapshot.load_from_file(tmp_path)
