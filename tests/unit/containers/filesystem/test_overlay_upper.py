import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ares_exp.containers.filesystem import overlay_upper
from ares_exp.containers.filesystem.delta import Delta, Entry, contents, differences
from ares_exp.containers.filesystem.delta_encoding import get_delta, put_delta
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan, write_tree
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.errors import CaptureError
from tests.unit.containers.filesystem import trees

pytestmark = pytest.mark.once

KEY = "a-very-secret-value-0123456789"


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    path = tmp_path / "upper"
    path.mkdir()
    return path


def scanned(upper: Path, objects: ObjectStore, **options: object) -> dict[str, Entry]:
    return scan(upper, objects, ScanCache(), notes=[], **options)  # type: ignore[arg-type]


def content(objects: ObjectStore, entries: dict[str, Entry], path: str) -> bytes:
    return b"".join(map(bytes, contents(objects, path, entries[path])))


def make_old(path: Path) -> None:
    """Times of change that no later write can have again, as after a while. The file itself stays as it is."""
    found = path.stat()
    while time.time_ns() - found.st_ctime_ns < 40_000_000:
        pass


@pytest.mark.root
@pytest.mark.parametrize("options", [(), ("userxattr",)], ids=["trusted", "user"])
def test_overlay_changes_round_trip(tmp_path: Path, objects: ObjectStore, options: tuple[str, ...]) -> None:
    base = trees.make_base(tmp_path / "base")
    first = trees.Overlay(tmp_path / "first", base)
    with first.mounted(*options) as merged:
        trees.change_everything(merged)
        trees.make_unkept(merged)
        notes: list[str] = []
        entries = scan(first.upper, objects, ScanCache(), notes=notes)
        seen = trees.tree_of(merged)
    kinds = {path: entry.kind for path, entry in entries.items()}
    assert {path for path, kind in kinds.items() if kind == "whiteout"} == {
        "/etc/removed", "/etc/old-link", "/usr/share/gone"
    }  # fmt: skip
    assert entries["/usr/share/renewed"].opaque
    assert kinds["/usr/share/becomes-file"] == "file"
    assert "/usr/lib" not in entries
    assert sorted(notes) == ["'/null' is not captured: it is a device.", "'/socket' is not captured: it is a socket."]

    delta = get_delta(objects, put_delta(Delta("host:x", entries), objects))
    assert differences(delta, Delta("host:x", entries)) == []
    second = trees.Overlay(tmp_path / "second", base)
    mark = "user.overlay.opaque" if options else "trusted.overlay.opaque"
    write_tree(delta.entries, objects, second.upper, opaque_xattr=mark)
    assert differences(delta, Delta("host:x", scanned(second.upper, objects))) == []
    with second.mounted(*options) as merged:
        del seen["/null"], seen["/socket"]
        assert trees.tree_of(merged) == seen


@pytest.mark.root
def test_deletions_as_attributes_are_read(upper: Path, objects: ObjectStore) -> None:
    """Newer kernels read them, and tools that may not make devices write them."""
    (upper / "d").mkdir()
    (upper / "d/gone").touch()
    (upper / "d/file").touch()
    os.setxattr(upper / "d", "trusted.overlay.opaque", b"x")
    os.setxattr(upper / "d/gone", "trusted.overlay.whiteout", b"")
    entries = scanned(upper, objects)
    assert not entries["/d"].opaque
    assert entries["/d/gone"] == Entry("whiteout")
    assert entries["/d/file"].kind == "file"


@pytest.mark.root
@pytest.mark.parametrize("name", ["trusted.overlay.redirect", "trusted.overlay.metacopy"])
def test_content_outside_the_upper_directory_is_refused(upper: Path, objects: ObjectStore, name: str) -> None:
    (upper / "d").mkdir()
    os.setxattr(upper / "d", name, b"/other")
    with pytest.raises(CaptureError, match=rf"'/d' cannot be read: .* elsewhere \({name}\)"):
        scanned(upper, objects)


@pytest.fixture
def own_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        if trees.IS_ROOT:
            os.chown(name, trees.NOBODY, trees.NOBODY)
        yield Path(name)


def test_ordinary_user_gets_the_same_files(own_directory: Path) -> None:
    with trees.as_nobody():
        own = (os.geteuid(), os.getegid())
        first, second, objects = own_directory / "first", own_directory / "second", ObjectStore(own_directory / "store")
        for directory in (first, second):
            directory.mkdir()
        trees.make_awkward(first / "n", owners=False)
        entries = scan(first, objects, ScanCache(), notes=[], root_ids=own)
        assert {(entry.uid, entry.gid) for entry in entries.values()} == {(0, 0)}
        write_tree(entries, objects, second, root_ids=own)
        assert trees.tree_of(second) == trees.tree_of(first)


def test_several_directories_become_one_delta(tmp_path: Path, objects: ObjectStore) -> None:
    cache, notes = ScanCache(), list[str]()
    for name in ("root", "usr"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/tool").write_text(name)
        os.link(tmp_path / name / "bin/tool", tmp_path / name / "bin/link")
    (tmp_path / "usr").chmod(0o711)
    entries: dict[str, Entry] = {}
    for name, at in (("root", "/"), ("usr", "/usr"), ("usr", "/opt/deep/")):
        entries |= scan(tmp_path / name, objects, cache, notes=notes, at=at)
    assert list(entries) == [
        *("/bin", "/bin/link", "/bin/tool", "/usr", "/usr/bin", "/usr/bin/link", "/usr/bin/tool"),
        *("/opt/deep", "/opt/deep/bin", "/opt/deep/bin/link", "/opt/deep/bin/tool"),
    ]
    assert entries["/usr"].mode == 0o711
    links = [entries[f"{at}/bin/tool"].link for at in ("", "/usr", "/opt/deep")]
    assert len(set(links)) == 3
    assert None not in links
    (tmp_path / "out").mkdir()
    part = {path: entry for path, entry in entries.items() if path.startswith("/usr")}
    write_tree(part, objects, tmp_path / "out", at="/usr")
    assert (tmp_path / "out/bin/tool").read_text() == "usr"
    assert (tmp_path / "out").stat().st_mode & 0o7777 == 0o711


def test_skipped_directories_are_not_scanned(upper: Path, objects: ObjectStore) -> None:
    for name in ("proc", "dev/shm", "sys", "mounted/on", "etc", "devices"):
        (upper / name).mkdir(parents=True)
        (upper / name / "file").touch()
    (upper / "etc/hosts").touch()
    entries = scanned(upper, objects, skip=lambda path: path in ("/mounted", "/etc/hosts"))
    assert list(entries) == ["/devices", "/devices/file", "/etc", "/etc/file"]


def test_unchanged_files_are_not_read_again(upper: Path, objects: ObjectStore) -> None:
    cache, notes = ScanCache(), list[str]()
    for name in ("a", "b", "gone"):
        (upper / name).write_bytes(name.encode() * 300_000)
    make_old(upper / "gone")
    first = scan(upper, objects, cache, notes=notes)
    # Were it read again, these would be other bytes: what is known is kept by identity.
    second = scan(upper, objects, cache, notes=notes)
    assert all(second[path] is first[path] for path in first)
    (upper / "b").write_bytes(b"B" * 300_000)
    (upper / "gone").unlink()
    third = scan(upper, objects, cache, notes=notes)
    assert third["/a"] is first["/a"]
    assert content(objects, third, "/b") == b"B" * 300_000
    assert list(third) == ["/a", "/b"]
    assert len(cache[upper]) <= 2, "what is gone is forgotten"
    (upper / "a").chmod(0o600)
    assert scan(upper, objects, cache, notes=notes)["/a"].mode == 0o600


def test_recently_changed_file_is_read_again(
    upper: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next change could have the very same times."""
    cache = ScanCache()
    (upper / "f").write_text("one")
    changed = (upper / "f").stat().st_ctime_ns
    monkeypatch.setattr(time, "time_ns", lambda: changed + 1)
    scan(upper, objects, cache, notes=[])
    assert cache[upper] == {}


def test_file_removed_from_the_store_is_read_again(upper: Path, objects: ObjectStore, tmp_path: Path) -> None:
    cache = ScanCache()
    (upper / "f").write_bytes(b"data")
    make_old(upper / "f")
    entry = scan(upper, objects, cache, notes=[])["/f"]
    objects.remove_unneeded(set(), older_than_sec=-60)
    for store in (objects, ObjectStore(tmp_path / "another")):
        assert not store.file(str(entry.chunks[0])).exists()
        entries = scan(upper, store, cache, notes=[])
        assert content(store, entries, "/f") == b"data"


@pytest.mark.parametrize(
    ("size", "writes", "stored"),
    [
        (0, {}, 0),
        (1, {}, 0),
        (CHUNK_BYTES, {}, 0),
        (10 * CHUNK_BYTES + 1, {}, 0),
        (10 * CHUNK_BYTES, {0: b"x"}, 1),
        (10 * CHUNK_BYTES + 1, {10 * CHUNK_BYTES: b"x"}, 1),
        (10 * CHUNK_BYTES, {5 * CHUNK_BYTES - 1: b"xy"}, 2),
        (3 * CHUNK_BYTES, {0: bytes(3 * CHUNK_BYTES)}, 0),
        (3 * CHUNK_BYTES, {0: b"x" * CHUNK_BYTES, 2 * CHUNK_BYTES: b"x" * CHUNK_BYTES}, 1),
        (2**33, {2**32: b"x"}, 1),
    ],
)
def test_holes_and_zeros_are_not_stored(
    upper: Path, objects: ObjectStore, tmp_path: Path, size: int, writes: dict[int, bytes], stored: int
) -> None:
    with (upper / "f").open("wb") as file:
        file.truncate(size)
        for offset, data in writes.items():
            file.seek(offset)
            file.write(data)
    entries = scanned(upper, objects)
    assert len(list(objects.digests())) == stored
    (tmp_path / "out").mkdir()
    write_tree(entries, objects, tmp_path / "out")
    restored = (tmp_path / "out/f").stat()
    assert restored.st_size == size
    assert restored.st_blocks * 512 <= (stored + 1) * 2 * CHUNK_BYTES
    with (tmp_path / "out/f").open("rb") as file:
        for offset, data in writes.items():
            file.seek(offset)
            assert file.read(len(data)) == data


@pytest.mark.parametrize("offset", [0, 1000, CHUNK_BYTES - 5, CHUNK_BYTES - len(KEY), 3 * CHUNK_BYTES - 1])
def test_file_with_a_secret_is_refused(
    upper: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", KEY)
    (upper / "d").mkdir()
    (upper / "d/notes.txt").write_bytes(b"x" * offset + KEY.encode() + b"y" * (4 * CHUNK_BYTES))
    with pytest.raises(CaptureError, match=r"'/d/notes\.txt' contains a secret: a protected value") as error:
        scanned(upper, objects)
    assert KEY not in str(error.value)
    assert not any(KEY.encode() in objects.get(digest) for digest in objects.digests())


@pytest.mark.parametrize(
    ("bound", "most", "message"),
    [("MAX_ENTRIES", 2, "at most 2 changed files"), ("MAX_BYTES", 299, "more than 299 bytes")],
)
def test_scan_is_bounded(
    upper: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, bound: str, most: int, message: str
) -> None:
    monkeypatch.setattr(overlay_upper, bound, most)
    for name in "abc":
        (upper / name).write_bytes(b"x" * 100)
    with pytest.raises(CaptureError, match=f"{message}.* \\(last read: '/[abc]'\\)"):
        scanned(upper, objects)


def test_scan_does_not_follow_links(upper: Path, objects: ObjectStore, tmp_path: Path) -> None:
    """Not even one that takes the place of a directory while the directory is on the list of those to read."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "private").write_text("private")
    (upper / "link").symlink_to(outside)
    for name in ("first", "second"):
        (upper / name).mkdir()

    def swap(path: str) -> bool:
        if path.count("/") == 1 and path != "/link" and not (upper / path[1:]).is_symlink():
            (upper / path[1:]).rmdir()
            (upper / path[1:]).symlink_to(outside)
        return False

    entries = scanned(upper, objects, skip=swap)
    assert entries["/link"].target == str(outside)
    assert [path for path in entries if "private" in path] == []
    with pytest.raises(CaptureError, match="cannot be read"):
        scanned(upper / "link", objects)


def test_file_modified_during_scan_is_stored_with_note(upper: Path, objects: ObjectStore) -> None:
    file = upper / "log"
    file.write_bytes(b"x" * CHUNK_BYTES * 2)

    class Growing(ObjectStore):
        def put(self, data: bytes) -> str:
            with file.open("ab") as log:
                log.write(b"more")
            return super().put(data)

    notes: list[str] = []
    store = Growing(objects.path)
    entries = scan(upper, store, ScanCache(), notes=notes)
    assert content(store, entries, "/log").startswith(b"x" * CHUNK_BYTES)
    assert notes == ["'/log' was modified while it was read: the stored content may be inconsistent."]


def test_endlessly_shrinking_file_is_refused(upper: Path, objects: ObjectStore) -> None:
    file = upper / "log"
    file.write_bytes(b"".join(number.to_bytes(2) * (CHUNK_BYTES // 2) for number in range(1, 300)))

    class Shrinking(ObjectStore):
        def put(self, data: bytes) -> str:
            if data[:2] == b"\0\1":  # the first chunk, whenever the file is read from its start
                os.truncate(file, file.stat().st_size // 3)
            return super().put(data)

    with pytest.raises(CaptureError, match="'/log' cannot be read: a process shortened it"):
        scan(upper, Shrinking(objects.path), ScanCache(), notes=[])


@pytest.mark.parametrize("vanish", [Path.unlink, lambda path: shutil.rmtree(path.parent)])
def test_file_deleted_during_scan_is_omitted(upper: Path, objects: ObjectStore, vanish: Callable[[Path], None]) -> None:
    (upper / "d").mkdir()
    (upper / "d/f").touch()
    (upper / "stays").touch()

    def skip(path: str) -> bool:
        if path == "/d/f":
            vanish(upper / "d/f")
        return False

    assert "/d/f" not in (entries := scanned(upper, objects, skip=skip))
    assert "/stays" in entries


def nested(upper: Path, name: str, depth: int) -> None:
    """Directories in each other, deeper than one path could name."""
    here = os.open(upper, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_deep_tree_needs_few_file_descriptors(upper: Path, objects: ObjectStore) -> None:
    nested(upper, "d", 400)
    upper.joinpath(*["d"] * 400, "f").write_text("deep")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(path.name) for path in Path("/proc/self/fd").iterdir())  # by other tests
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 150, limits[1]))
    try:
        entries = scanned(upper, objects)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert content(objects, entries, "/d" * 400 + "/f") == b"deep"


def test_too_long_path_is_refused(upper: Path, objects: ObjectStore) -> None:
    nested(upper, "d" * 250, 20)
    with pytest.raises(CaptureError, match="Expected paths of at most 4095 bytes"):
        scanned(upper, objects)


def test_missing_directory_is_named(tmp_path: Path, objects: ObjectStore) -> None:
    with pytest.raises(CaptureError, match=r"in .*/nothing cannot be read: No such file or directory"):
        scanned(tmp_path / "nothing", objects)


def test_unreadable_file_of_ordinary_user_is_named(upper: Path, objects: ObjectStore) -> None:
    own = Path(tempfile.mkdtemp())
    try:
        own.chmod(0o755)
        (own / "f").touch()
        (own / "f").chmod(0)
        with trees.as_nobody(), pytest.raises(CaptureError, match="'/f' cannot be read: Permission denied"):
            scanned(own, objects)
    finally:
        shutil.rmtree(own)
