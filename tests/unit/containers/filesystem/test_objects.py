import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ares_exp.containers.filesystem.stored_objects import MAX_OBJECT_BYTES, ObjectStore
from ares_exp.containers.filesystem.zstd import zstd
from ares_exp.containers.local.isolation import find_bwrap
from ares_exp.errors import CaptureError, SnapshotCorruptError, SnapshotMetadataError, UnsafeSnapshotError
from tests.unit.containers.local_containers import STEADY_MOUNTS

MANY_PUTS = """
import os, sys
from pathlib import Path
from ares_exp.containers.filesystem.stored_objects import ObjectStore
store, start, count = ObjectStore(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
for number in range(start, start + count):
    store.put(number.to_bytes(8) * 8192)
    print(number, flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path)


def putting(path: Path, start: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MANY_PUTS, str(path), str(start), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def temporary_files(store: ObjectStore) -> list[Path]:
    return list((store.path / "objects" / "tmp").glob("*"))


@pytest.mark.parametrize("data", [b"", b"x", b"text " * 100_000, os.urandom(300_000)])
def test_object_round_trips_and_is_stored_once(store: ObjectStore, data: bytes) -> None:
    digest = store.put(data)
    assert store.put(data) == digest
    assert store.get(digest) == data
    assert store.file(digest).exists()
    assert list(store.digests()) == [digest]
    assert store.size(digest) == store.file(digest).stat().st_size <= len(data) + 64
    assert temporary_files(store) == []


def test_unused_store_creates_no_files(store: ObjectStore) -> None:
    assert not store.file("0" * 64).exists()
    assert not store.keep("0" * 64)
    assert list(store.digests()) == []
    store.sync()
    assert list(store.path.iterdir()) == []


@pytest.mark.parametrize("read", ["get", "size"])
def test_missing_object_is_named(store: ObjectStore, read: str) -> None:
    with pytest.raises(SnapshotCorruptError, match=r"objects/00/0{62} is missing\. Restore it"):
        getattr(store, read)("0" * 64)


@pytest.mark.parametrize("digest", ["", "../" * 20, "0" * 63, "0" * 65, "A" * 64, "0" * 62 + "/x", None, 5])
def test_invalid_digest_is_rejected(store: ObjectStore, digest: str) -> None:
    for use in (store.get, store.file, store.keep, store.size):
        with pytest.raises(SnapshotMetadataError, match="Expected a sha256 digest of 64 hexadecimal digits, got"):
            use(digest)


@pytest.mark.parametrize("data", [b"", b"x", b"content " * 100_000])
def test_frame_header_has_the_size_of_the_content(store: ObjectStore, data: bytes) -> None:
    frame = store.file(store.put(data)).read_bytes()
    assert zstd.get_frame_info(frame).decompressed_size == len(data)
    assert store.get(hashlib.sha256(data).hexdigest()) == data


def damaged_in_turn(file: Path) -> None:
    frame = file.read_bytes()
    other = zstd.compress(b"another content")
    without_size = zstd.ZstdCompressor(options={zstd.CompressionParameter.content_size_flag: 0})
    no_size = without_size.compress(b"content", without_size.FLUSH_FRAME)
    variants = [b"", frame[:-1], frame[:5], frame + b"x", bytes([frame[0] ^ 1]) + frame[1:], other, no_size, b"\0" * 50]
    for variant in variants:
        file.write_bytes(variant)
        yield


def test_damaged_object_is_refused_and_rewritten_by_put(store: ObjectStore) -> None:
    data = b"content " * 1000
    file = store.file(store.put(data))
    for _ in damaged_in_turn(file):
        with pytest.raises(SnapshotCorruptError, match="is damaged"):
            store.get(file.parent.name + file.name)
        other_process = ObjectStore(store.path)
        assert other_process.get(other_process.put(data)) == data


def test_fifo_directory_or_link_as_object_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    digest = store.put(b"data")
    file = store.file(digest)
    moved = file.rename(tmp_path / "moved")
    for make in (lambda: os.mkfifo(file), file.mkdir, lambda: file.symlink_to(moved)):
        make()
        with pytest.raises(SnapshotCorruptError, match=r"is not a file|cannot be read"):
            store.get(digest)
        file.rmdir() if file.is_dir() else file.unlink()


def test_compression_bomb_is_refused_before_decompression(store: ObjectStore) -> None:
    digest = store.put(b"x")
    file = store.file(digest)
    file.write_bytes(zstd.compress(bytes(MAX_OBJECT_BYTES + 1)))
    with pytest.raises(
        UnsafeSnapshotError, match=f"at most {MAX_OBJECT_BYTES} bytes, but its header states {MAX_OBJECT_BYTES + 1}"
    ):
        store.get(digest)
    with pytest.raises(UnsafeSnapshotError, match="at most 5 bytes"):
        store.get(store.put(b"123456"), max_bytes=5)
    file.write_bytes(b"")
    os.truncate(file, 2**40)
    with pytest.raises(UnsafeSnapshotError, match=f"found {2**40}"):
        store.get(digest)


def test_frame_with_wrong_size_is_damaged(store: ObjectStore) -> None:
    digest = store.put(b"x")
    frame = bytearray(zstd.compress(bytes(1_000_000)))
    assert frame[5:9] == (1_000_000).to_bytes(4, "little")
    frame[5:9] = (1000).to_bytes(4, "little")
    store.file(digest).write_bytes(frame)
    with pytest.raises(SnapshotCorruptError, match="is damaged"):
        store.get(digest, max_bytes=2000)


def test_threads_put_same_objects_concurrently(store: ObjectStore) -> None:
    contents = [bytes([number]) * 200_000 for number in range(20)] * 4
    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(store.put, contents))
        pool.submit(store.sync).result()
    assert [store.get(digest) for digest in digests] == contents
    assert len(list(store.digests())) == 20
    assert temporary_files(store) == []


def test_two_processes_put_same_objects_concurrently(store: ObjectStore) -> None:
    writers = [putting(store.path, start, 300) for start in (0, 0, 200)]
    assert [writer.communicate(timeout=60) and writer.returncode for writer in writers] == [0, 0, 0]
    assert {store.get(digest)[:8] for digest in store.digests()} == {number.to_bytes(8) for number in range(500)}
    assert temporary_files(store) == []


def test_killed_process_leaves_only_complete_objects(store: ObjectStore) -> None:
    for round_number in range(5):
        writer = putting(store.path, round_number * 100_000, 100_000)
        with writer:
            assert writer.stdout
            for _ in range(20 + 7 * round_number):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
    digests = list(store.digests())
    assert len(digests) >= 5 * 20
    for digest in digests:
        assert len(store.get(digest)) == 65536
    store.remove_unneeded(set(digests), older_than_sec=-60)
    assert temporary_files(store) == []
    assert sorted(store.digests()) == sorted(digests)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files and directories that were written through to the disk, in order."""
    paths: list[Path] = []
    fsync, lock = os.fsync, threading.Lock()

    def record(file: int) -> None:
        fsync(file)
        with lock:
            paths.append(Path(f"/proc/self/fd/{file}").readlink())

    monkeypatch.setattr(os, "fsync", record)
    return paths


def test_sync_flushes_new_objects(store: ObjectStore, synced: list[Path]) -> None:
    first, second = store.file(store.put(b"first")), store.file(store.put(b"second"))
    assert synced == []
    store.sync()
    directories = {first.parent, second.parent}
    assert set(synced[:2]) == {first, second}
    assert set(synced[2:-3]) == directories
    assert synced[-3:] == [store.path / "objects", store.path, store.path.parent]
    synced.clear()
    store.put(b"first")
    store.sync()
    assert synced == []
    ObjectStore(store.path).put(b"first")
    other = ObjectStore(store.path)
    assert other.keep(other.put(b"second"))
    other.sync()
    assert synced[0] == second, "another process may have put it and not synced it yet"


def test_failed_sync_is_repeated_by_the_next(
    store: ObjectStore, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = store.file(store.put(b"data"))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda _: os.close(-1))
        with pytest.raises(OSError, match="Bad file descriptor"):
            store.sync()
    store.sync()
    assert file in synced


def test_cleanup_removes_unneeded_and_keeps_young_objects(store: ObjectStore) -> None:
    needed, old, young, kept = (store.put(data) for data in (b"needed", b"old" * 1000, b"young", b"kept"))
    for digest in (needed, old, kept):
        os.utime(store.file(digest), (time.time() - 7200,) * 2)
    assert store.keep(kept)
    size = store.size(old)
    assert store.remove_unneeded({needed}, older_than_sec=3600) == (1, size)
    assert set(store.digests()) == {needed, young, kept}
    assert not store.file(old).exists()
    assert store.get(store.put(b"old" * 1000)) == b"old" * 1000
    store.sync()
    assert store.remove_unneeded(set(), older_than_sec=-60)[0] == 4
    store.sync()


def test_lines_round_trip(store: ObjectStore) -> None:
    for lines in (
        [],
        [b""],
        [b"", b""],
        [b"a", b"", b"\xff"],
        [b"x" * 40_000, b"y"],
        [b"%d" % n for n in range(20_000)],
    ):
        assert store.get_lines(store.put_lines(lines)) == lines


def test_growing_list_shares_all_objects_except_last(store: ObjectStore) -> None:
    lines = [b"%d " % number * 50 for number in range(5000)]
    before = store.put_lines(lines)
    after = store.put_lines([*lines, b"one more"])
    assert len(before) > 10
    assert after[: len(before) - 1] == before[:-1]
    assert len(after) <= len(before) + 1


def test_lines_are_bounded(store: ObjectStore) -> None:
    digests = store.put_lines([b"line"] * 100)
    assert len(store.get_lines(digests, max_lines=100, max_bytes=500)) == 100
    with pytest.raises(UnsafeSnapshotError, match="limit of 99 lines"):
        store.get_lines(digests, max_lines=99)
    with pytest.raises(UnsafeSnapshotError, match="at most 499 bytes"):
        store.get_lines(digests, max_bytes=499)
    with pytest.raises(UnsafeSnapshotError):
        store.get_lines(digests * 3, max_bytes=1000)
    with pytest.raises(SnapshotCorruptError, match="last line has no newline"):
        store.get_lines([store.put(b"no line end")])
    with pytest.raises(SnapshotCorruptError, match="last line has no newline"):
        store.get_lines([store.put(b"")])
    with pytest.raises(ValueError, match="without line breaks"):
        store.put_lines([b"a\nb"])


def test_line_with_a_secret_is_not_stored(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", 'q"u\\o-te-1234')
    line = b'{"text": "the key is q\\"u\\\\o-te-1234"}'
    with pytest.raises(CaptureError, match="messages or journal contain a secret") as error:
        store.put_lines([b"before", line])
    assert "o-te" not in str(error.value)
    assert list(store.digests()) == []


@pytest.mark.local
def test_put_of_existing_object_accepts_read_only_store(tmp_path: Path) -> None:
    digest = ObjectStore(tmp_path).put(b"there")
    os.utime(ObjectStore(tmp_path).file(digest), (1, 1))
    code = f"""from pathlib import Path
from ares_exp.containers.filesystem.stored_objects import ObjectStore
assert ObjectStore(Path({str(tmp_path)!r})).put(b"there") == {digest!r}
"""
    bwrap = [*STEADY_MOUNTS, find_bwrap(), "--dev-bind", "/", "/", "--ro-bind", tmp_path, tmp_path]
    words = [*bwrap, sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
