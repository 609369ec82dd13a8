"""The archive with which changed files are written into a Docker container."""

import io
import subprocess
import tarfile
from pathlib import Path

from ares_exp.containers.docker.capture import read_tar
from ares_exp.containers.docker.container import archive
from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges, differences
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from tests.unit.containers.filesystem.trees import make_awkward, tree_of


def archived(entries: dict[str, Entry], objects: ObjectStore) -> bytes:
    return b"".join(archive(StoredChanges(Delta("x:1", entries), objects)))


def test_archive_holds_every_kind_of_entry(objects: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    make_awkward(tmp_path / "source" / "n")
    awkward = scan(tmp_path / "source", objects, ScanCache(), notes=[])
    data = archived(awkward, objects)
    assert len(data) % tarfile.BLOCKSIZE == 0
    assert data == archived(dict(reversed(awkward.items())), objects)
    found = read_tar(io.BytesIO(data), objects, notes=[])
    assert differences(Delta("x:1", awkward), Delta("x:1", found)) == []
    (tmp_path / "out").mkdir()
    subprocess.run(
        ["tar", "--extract", "--directory", tmp_path / "out", "--same-permissions", "--numeric-owner", "--same-owner",
         "--xattrs", "--xattrs-include=*"],
        input=data, check=True,
    )  # fmt: skip
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "source")


def test_archive_takes_any_name_and_time(objects: ObjectStore) -> None:
    entries = {
        "/.wh.x": Entry("file", mtime_ns=-1_500_000_000),
        "/d": Entry("directory"),
        "/d/.wh..wh..opq": Entry("fifo"),
        "/d/" + "n" * 255: Entry("file", link=4, uid=5),
        "/d/z": Entry("file", link=4, uid=5),
    }
    assert differences(
        Delta("x:1", read_tar(io.BytesIO(archived(entries, objects)), objects, notes=[])), Delta("x:1", entries)
    ) == []  # fmt: skip


def test_attributes_unsupported_by_archives_are_omitted(objects: ObjectStore) -> None:
    entries = {"/d": Entry("directory", xattrs={"user.a=b": b"1", "user.c": b"2", "user.\udcff": b"3"})}
    with tarfile.open(fileobj=io.BytesIO(archived(entries, objects))) as found:
        assert found.getmembers()[0].pax_headers == {"SCHILY.xattr.user.c": "2"}
