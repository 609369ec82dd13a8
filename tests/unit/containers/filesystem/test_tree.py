import os
import stat
import tempfile
from pathlib import Path

import pytest

from ares_exp.containers.filesystem.delta import Entry, EntryKind
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan, write_tree
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.errors import RestoreError, SnapshotCorruptError
from tests.unit.containers.filesystem.trees import IS_ROOT, NOBODY, as_nobody, make_awkward, tree_of

pytestmark = pytest.mark.once

DIRECTORY = Entry("directory", mode=0o755, uid=os.geteuid(), gid=os.getegid())
FILE = Entry("file", mode=0o644, uid=os.geteuid(), gid=os.getegid())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


def test_plain_tree_round_trips(tmp_path: Path, out: Path, objects: ObjectStore) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make_awkward(source / "n")
    entries = scan(source, objects, ScanCache(), notes=[])
    write_tree(entries, objects, out)
    assert tree_of(out) == tree_of(source)
    open_files = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(RestoreError, match="cannot be created: File exists"):
        write_tree(entries, objects, out)
    assert set(Path("/proc/self/fd").iterdir()) <= open_files


def test_existing_directories_get_the_metadata(out: Path, objects: ObjectStore) -> None:
    (out / "d").mkdir(mode=0o700)
    write_tree({"/d": Entry("directory", mode=0o751, uid=os.geteuid(), gid=os.getegid(), mtime_ns=5)}, objects, out)
    assert stat.S_IMODE((out / "d").stat().st_mode) == 0o751
    assert (out / "d").stat().st_mtime_ns == 5


@pytest.mark.parametrize(
    "inner", [FILE, DIRECTORY, Entry("fifo"), Entry("symlink", target="x"), Entry("file", link=1)], ids=str
)
def test_links_are_not_followed(out: Path, objects: ObjectStore, tmp_path: Path, inner: Entry) -> None:
    """`decode` refuses such entries; here is the second lock."""
    outside = tmp_path / "outside"
    outside.mkdir()
    link = Entry("symlink", target=str(outside), uid=os.geteuid(), gid=os.getegid())
    with pytest.raises(RestoreError, match="'/d/in' cannot be created: Not a directory"):
        write_tree({"/d": link, "/d/in": inner}, objects, out)
    (out / "there").symlink_to(outside)
    with pytest.raises(RestoreError, match=r"'/there(/in)?' cannot be created: (File exists|Not a directory)"):
        write_tree({"/there": DIRECTORY, "/there/in": inner}, objects, out)
    assert list(outside.iterdir()) == []
    with pytest.raises(RestoreError, match="cannot be written to"):
        write_tree({}, objects, out / "there")


def test_existing_link_is_not_written_through(out: Path, objects: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("safe")
    (out / "f").symlink_to(tmp_path / "victim")
    with pytest.raises(RestoreError, match="'/f' cannot be created: File exists"):
        write_tree({"/f": FILE}, objects, out)
    assert (tmp_path / "victim").read_text() == "safe"


@pytest.mark.parametrize("path", ["/other/f", "/usrx", "/"])
def test_path_outside_the_root_is_refused(out: Path, objects: ObjectStore, path: str) -> None:
    with pytest.raises(RestoreError, match="it is outside of /usr"):
        write_tree({path: FILE}, objects, out, at="/usr")


@pytest.mark.parametrize("kind", ["file", "symlink", "whiteout"])
def test_root_must_be_a_directory(out: Path, objects: ObjectStore, kind: EntryKind) -> None:
    with pytest.raises(RestoreError, match=f"'/usr' cannot be created: it must be a directory, not a {kind}"):
        write_tree({"/usr": Entry(kind)}, objects, out, at="/usr")


@pytest.mark.parametrize("entry", [Entry("whiteout"), Entry("directory", opaque=True)], ids=["whiteout", "opaque"])
def test_deletions_need_an_overlay(out: Path, objects: ObjectStore, entry: Entry) -> None:
    with pytest.raises(RestoreError, match="'/x' cannot be deleted: only an overlay"):
        write_tree({"/x": entry}, objects, out, root_ids=(os.geteuid(), os.getegid()))


@pytest.mark.parametrize("size", [3, 5, CHUNK_BYTES])
def test_object_of_wrong_size_is_refused(out: Path, objects: ObjectStore, size: int) -> None:
    entry = Entry("file", size=size, chunks=(objects.put(b"four"),))
    with pytest.raises(SnapshotCorruptError, match=f"to contain {size} bytes of '/f', got 4"):
        write_tree({"/f": entry}, objects, out)


def test_attribute_forbidden_to_ordinary_user_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        if IS_ROOT:
            os.chown(name, NOBODY, NOBODY)
        with as_nobody():
            objects, out = ObjectStore(Path(name, "store")), Path(name)
            own = (os.geteuid(), os.getegid())
            owned = {"/f": Entry("file", uid=5)}
            with pytest.raises(
                RestoreError, match="The owner of '/f' cannot be set to user 5, group 0: Operation not permitted"
            ):
                write_tree(owned, objects, out, root_ids=own)
            (out / "f").unlink()
            capable = {
                "/c": Entry("file", xattrs={"security.capability": bytes.fromhex("0100000200040000" + "0" * 24)})
            }
            with pytest.raises(RestoreError, match=r"attribute 'security\.capability' of '/c' cannot be set"):
                write_tree(capable, objects, out, root_ids=own)
