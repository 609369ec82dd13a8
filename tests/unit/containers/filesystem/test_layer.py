import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges, differences
from ares_exp.containers.filesystem.layer import write_layer
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.containers.filesystem.tar_entries import read_tar
from ares_exp.errors import SnapshotCorruptError
from tests.unit.containers.filesystem.trees import make_awkward, tree_of


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "store")


def layer(entries: dict[str, Entry], objects: ObjectStore) -> tuple[bytes, list[str]]:
    file = io.BytesIO()
    left_out = write_layer(StoredChanges(Delta("x:1", entries), objects), file)
    return file.getvalue(), left_out


@pytest.fixture
def awkward(tmp_path: Path, objects: ObjectStore) -> dict[str, Entry]:
    (tmp_path / "source").mkdir()
    make_awkward(tmp_path / "source" / "n")
    return scan(tmp_path / "source", objects, ScanCache(), notes=[])


def test_a_layer_holds_all_that_was_scanned(awkward: dict[str, Entry], objects: ObjectStore) -> None:
    archive, left_out = layer(awkward, objects)
    assert left_out == []
    found = read_tar(io.BytesIO(archive), objects, notes=[])
    assert differences(Delta("x:1", awkward), Delta("x:1", found)) == []


def test_gnu_tar_reads_a_layer(awkward: dict[str, Entry], objects: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "layer.tar").write_bytes(layer(awkward, objects)[0])
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(
        ["tar", "--extract", "--file", tmp_path / "layer.tar", "--directory", out, "--same-permissions",
         "--numeric-owner", "--same-owner", "--xattrs", "--xattrs-include=*"],
        check=True,
    )  # fmt: skip
    assert tree_of(out) == tree_of(tmp_path / "source")


def test_the_same_changes_are_the_same_bytes(awkward: dict[str, Entry], objects: ObjectStore) -> None:
    turned = dict(reversed(awkward.items()))
    assert layer(turned, objects) == layer(awkward, objects)
    assert len(layer(awkward, objects)[0]) % tarfile.BLOCKSIZE == 0


def test_deletions_have_names(objects: ObjectStore) -> None:
    entries = {
        "/gone": Entry("whiteout"),
        "/d": Entry("directory", mode=0o700, mtime_ns=7_500_000_000, opaque=True),
        "/d/gone": Entry("whiteout"),
        "/d/" + "n" * 255: Entry("whiteout"),
        "/d/a": Entry("file", link=3, uid=5, mode=0o600, mtime_ns=-1_500_000_000),
        "/d/z": Entry("file", link=3, uid=5, mode=0o600, mtime_ns=-1_500_000_000),
    }
    with tarfile.open(fileobj=io.BytesIO(layer(entries, objects)[0])) as archive:
        members = {member.name: member for member in archive}
    assert list(members) == ["d", "d/.wh..wh..opq", "d/a", "d/.wh.gone", "d/.wh." + "n" * 255, "d/z", ".wh.gone"]
    assert members["d"].mtime == 7.5
    for name in ("d/.wh..wh..opq", "d/.wh.gone", ".wh.gone"):
        assert members[name].isreg()
        assert members[name].size == 0
    link = members["d/z"]
    assert (link.type, link.linkname) == (tarfile.LNKTYPE, "d/a")
    assert (link.uid, link.mode, link.mtime) == (5, 0o600, -1.5)


def test_what_a_layer_cannot_hold_is_left_out_and_said(objects: ObjectStore) -> None:
    entries = {
        "/.wh.x": Entry("file"),
        "/d": Entry("directory", xattrs={"user.a=b": b"1", "user.c": b"2", "user.\udcff": b"3"}),
        "/d/.wh..wh..opq": Entry("file"),
        "/d/.wh.d": Entry("directory"),
        "/d/.wh.d/inner": Entry("file"),
        "/d/.whx": Entry("file"),
    }
    archive, left_out = layer(entries, objects)
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        members = found.getmembers()
    assert [member.name for member in members] == ["d", "d/.whx"]
    assert members[0].pax_headers == {"SCHILY.xattr.user.c": "2"}
    assert len(left_out) == 6
    assert left_out[0] == "'/.wh.x' is left out: in a layer, its name means a deletion."


def test_a_missing_object_ends_it(objects: ObjectStore) -> None:
    with pytest.raises(SnapshotCorruptError):
        layer({"/f": Entry("file", size=1, chunks=("a" * 64,))}, objects)


def test_a_layer_is_written_to_a_pipe(objects: ObjectStore) -> None:
    source, sink = os.pipe()
    with os.fdopen(source, "rb") as reader:
        with os.fdopen(sink, "wb") as writer:
            write_layer(StoredChanges(Delta("x:1", {"/f": Entry("fifo", uid=3)}), objects), writer)
        assert read_tar(reader, objects, notes=[]) == {"/f": Entry("fifo", uid=3)}


def test_a_plain_archive_takes_any_name(objects: ObjectStore) -> None:
    entries = {"/.wh.x": Entry("file"), "/d": Entry("directory"), "/d/.wh..wh..opq": Entry("fifo")}
    file = io.BytesIO()
    assert write_layer(StoredChanges(Delta("x:1", entries), objects), file, plain=True) == []
    assert read_tar(io.BytesIO(file.getvalue()), objects, notes=[]) == entries


def test_holes_are_written_for_gnu_tar(tmp_path: Path, objects: ObjectStore) -> None:
    def content(data: bytes) -> Entry:
        pieces = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
        chunks = tuple(None if piece.strip(b"\0") == b"" else objects.put(piece) for piece in pieces)
        return Entry("file", 0o644, os.getuid(), os.getgid(), mtime_ns=1_500_000_000, size=len(data), chunks=chunks)

    hole, data = bytes(CHUNK_BYTES), os.urandom(CHUNK_BYTES)
    files = {
        "/all": hole * 50,
        "/start": hole * 50 + b"end",
        "/d/end": data + data + hole * 50 + b"\0\0\0",
        "/d/middle": data + hole * 30 + data[:9],
        "/d/many": (data + hole) * 40,
        f"/d/{'l' * 250}": hole + b"x",
        "/empty": b"",
        "/plain": data,
    }
    entries = {path: content(data) for path, data in files.items()} | {"/d": Entry("directory", 0o755)}
    file = io.BytesIO()
    changes = StoredChanges(Delta("x:1", entries), objects)
    assert write_layer(changes, file, plain=True, sparse=True) == []
    archive = file.getvalue()
    assert len(archive) < 50 * CHUNK_BYTES
    assert read_tar(io.BytesIO(archive), objects, notes=[]) == entries
    subprocess.run(["tar", "-C", tmp_path, "-x", "--no-same-owner"], input=archive, check=True, timeout=60)
    for path, expected in files.items():
        found = tmp_path / path[1:]
        assert found.read_bytes() == expected
        assert found.stat().st_mtime_ns == 1_500_000_000
    assert (tmp_path / "all").stat().st_blocks == 0


def test_an_archive_without_pax_headers(objects: ObjectStore) -> None:
    entries = {"/" + "ü" * 80: Entry("directory", 0o755, 3_000_000_000, 5, mtime_ns=10**9)}
    entries["/" + "ü" * 80 + "/" + "\udcff" * 120] = Entry("symlink", mtime_ns=-(10**9), target="t" * 200)
    file = io.BytesIO()
    write_layer(StoredChanges(Delta("x:1", entries), objects), file, plain=True, pax=False)
    with tarfile.open(fileobj=io.BytesIO(file.getvalue())) as archive:
        assert [member.pax_headers for member in archive] == [{}, {}]
    assert read_tar(io.BytesIO(file.getvalue()), objects, notes=[]) == entries
