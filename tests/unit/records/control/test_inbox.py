"""The inbox: orders are taken once, and whatever else lies there harms nothing."""

import json
import os
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.runs.control import orders as module
from ares_exp.runs.control.orders import MAX_BYTES, WATCHED, Inbox, Order, OrderFile, watch, write_order


def orders(found: list[OrderFile]) -> list[Order]:
    return [one.order for one in found if one.order is not None]


def rejected(found: list[OrderFile]) -> dict[str, str]:
    return {one.name: one.problem for one in found if one.order is None}


def test_commands_are_taken_once_oldest_first(tmp_path: Path) -> None:
    box = Inbox(tmp_path / "control")
    assert box.take() == []
    given = [Order.new("pause", now=True, for_sec=60, reason="a\x1b[2Jb"), Order.new("resume")]
    for one in reversed(given):
        write_order(box.folder, one)
    taken = box.take()
    assert orders(taken) == given
    assert {one.uid for one in taken} == {os.getuid()}
    assert box.take() == []
    assert list(box.folder.iterdir()) == []


def test_shared_commands_are_taken_by_each_job(tmp_path: Path) -> None:
    order = Order.new("pause")
    boxes = [Inbox(tmp_path / "control", is_shared=True) for _ in range(2)]
    path = write_order(tmp_path / "control", order)
    assert [orders(box.take()) for box in boxes] == [[order], [order]]
    assert [box.take() for box in boxes] == [[], []]
    assert path.exists()


def test_garbage_is_refused_once_and_removed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "control", tmp_path / "outside.json"
    whole = write_order(folder, Order.new("pause")).read_bytes()
    outside.write_bytes(whole)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (folder / "a-torn.json").write_bytes(whole[:-9])
    (folder / "b-huge.json").write_bytes(whole[:-2] + b" " * MAX_BYTES + b"}")
    (folder / "c-link.json").symlink_to(outside)
    (folder / "d-dangling.json").symlink_to("nowhere")
    (folder / "e-loop.json").symlink_to("e-loop.json")
    (folder / "f-folder.json").mkdir()
    (folder / "g-full.json").mkdir()
    (folder / "g-full.json" / "file").touch()
    (folder / "h-link-to-folder").symlink_to(tmp_path / "kept")
    os.mkfifo(folder / "i-pipe.json")
    (folder / "j-deep.json").write_text("[" * 30_000)
    (folder / "k-binary\udcff.json").write_bytes(bytes(range(256)))
    (folder / ".being-written.tmp").write_bytes(whole)
    box = Inbox(folder)
    taken = box.take()
    assert [one.verb for one in orders(taken)] == ["pause"]
    assert sorted(name[0] for name in rejected(taken)) == [*"abcdefghijk"]
    assert box.take() == []
    assert sorted(path.name for path in folder.iterdir()) == [".being-written.tmp", "g-full.json"]
    assert outside.read_bytes() == whole
    assert (tmp_path / "kept" / "file").exists()


WRONG = [
    ({"verb": "explode"}, "verb"),
    ({"id": "../../x"}, "id"),
    ({"at": float("inf")}, "at"),
    ({"more": 1}, "more"),
    ({"schema_version": 2}, "schema_version"),
    ({"by": "x" * 201}, "by"),
    ({"what": "task"}, "what"),
    ({"verb": "cancel"}, "what"),
    ({"verb": "set"}, "values"),
    ({"verb": "set", "values": {"a": [1]}}, "values"),
    ({"verb": "resume", "now": True}, "now"),
    ({"now": "yes"}, "now"),
    ({"for_sec": 0}, "for_sec"),
    ({"verb": "cancel", "what": "task", "verify": True}, "verify"),
]


@pytest.mark.parametrize(("change", "named"), WRONG)
def test_invalid_commands_are_refused(change: dict[str, object], named: str) -> None:
    said = {"id": "1", "verb": "pause", "by": "me", "at": 1.0}
    assert Order.parse(json.dumps(said).encode()).verb == "pause"
    with pytest.raises(ValueError, match=named):
        Order.parse(json.dumps(said | change).encode())


def test_flood_is_taken_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TAKEN", 10)
    box = Inbox(tmp_path / "control")
    write_order(box.folder, Order.new("resume"))
    for number in range(25):
        (box.folder / f"{number:03}.json").touch()
    pieces = [box.take() for _ in range(4)]
    assert [len(piece) for piece in pieces] == [10, 10, 6, 0]
    assert [one.verb for piece in pieces for one in orders(piece)] == ["resume"]


def test_link_replacing_the_inbox_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    path = write_order(elsewhere, Order.new("pause"))
    box = Inbox(tmp_path / "control")
    box.folder.symlink_to(elsewhere)
    assert list(rejected(box.take())) == ["control"]
    assert box.take() == []
    watch(box.folder)
    with pytest.raises(ConfigError, match="it is a link"):
        write_order(box.folder, Order.new("pause"))
    assert list(elsewhere.iterdir()) == [path]


def test_watcher_is_remembered_for_a_while(tmp_path: Path) -> None:
    box = Inbox(tmp_path / "control")
    assert not box.is_watched
    watch(box.folder)
    assert box.is_watched
    os.utime(box.folder / WATCHED, (0, 0))
    assert not box.is_watched
    assert box.take() == []
