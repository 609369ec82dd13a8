"""The object store: a directory that contains each object once, in a file named by the digest of its content.

The file `<path>/objects/ab/cdef…` is one zstd frame, whose header contains the uncompressed size. The name is the
sha256 of the uncompressed bytes (`abcdef…`). A file gets this name only when it is complete. Objects are untrusted: a
read limits their size, and compares their digest with the name.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ares_exp.errors import CaptureError, SnapshotCorruptError, SnapshotMetadataError, UnsafeSnapshotError
from ares_exp.records.secrets import KnownSecrets

_LEVEL = 3
_REMEDY = "Restore it from a copy of the store, or use another snapshot."
_codecs = threading.local()  # a compressor serves one thread at a time


def compressed(data: bytes) -> bytes:
    """Returns `data` as one zstd frame with the size in its header."""
    from ares_exp.containers.filesystem.zstd import zstd

    if not hasattr(_codecs, "compressor"):
        _codecs.compressor = zstd.ZstdCompressor(level=_LEVEL)
    # A single call for the whole frame, so that its header has the size of the content.
    frame: bytes = _codecs.compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
    return frame


def read_frame(path: Path, max_bytes: int) -> bytes:
    """Returns the uncompressed content of a file that is one zstd frame.

    Raises `SnapshotCorruptError` if the file is missing or damaged, and `UnsafeSnapshotError` if the content has more
    than `max_bytes`.
    """
    from ares_exp.containers.filesystem.zstd import zstd

    try:
        # Rejects links and fifos.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise damaged(path, "it is not a file")
            limit = max_bytes + max_bytes // 128 + 1024  # zstd adds less to incompressible data
            if found.st_size > limit:
                raise UnsafeSnapshotError(f"Expected {path} to have at most {limit} bytes, found {found.st_size}.")
            frame = file.read(found.st_size)
    except OSError as error:
        raise _unreadable(path, error) from None
    decompressor = zstd.ZstdDecompressor()
    try:
        size = zstd.get_frame_info(frame).decompressed_size
        if size is None:
            raise damaged(path, "its header has no size")
        if size > max_bytes:
            raise UnsafeSnapshotError(
                f"Expected {path} to contain at most {max_bytes} bytes, but its header states {size}."
            )
        data = decompressor.decompress(frame, max_length=size + 1)  # bounds the memory for any frame
    except zstd.ZstdError as error:
        raise damaged(path, str(error)) from None
    if not decompressor.eof:
        raise damaged(path, f"it ends after {len(data)} of {size} bytes")
    if decompressor.unused_data:
        raise damaged(path, f"it has {len(decompressor.unused_data)} bytes after its end")
    return data


def damaged(path: Path, why: str) -> SnapshotCorruptError:
    """Returns the error to raise for a damaged object. `why` is a clause."""
    return SnapshotCorruptError(f"{path} is damaged: {why}. {_REMEDY}")


def _unreadable(path: Path, error: OSError) -> SnapshotCorruptError:
    what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return SnapshotCorruptError(f"{path} {what}. {_REMEDY}")


CHUNK_BYTES = 128 * 1024
MAX_OBJECT_BYTES = 64 * 2**20
MAX_LINES = 4_000_000
MAX_LINES_BYTES = 2**30

_LINES_BYTES = 32 * 1024
_YOUNG_SEC = 600.0
_SYNC_THREADS = 16
DIGEST = re.compile(r"[0-9a-f]{64}")


class ObjectStore:
    """The objects of a snapshot store. Several threads and processes may use the same directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._pending: set[str] = set()  # put or kept since the last `sync()`
        self._durable: set[str] = set()

    def put(self, data: bytes) -> str:
        """Stores `data`, and returns its digest. The object survives a power cut only after `sync()`."""
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            is_known = digest in self._durable or digest in self._pending
        if (is_known or self._is_whole(digest, data)) and self.keep(digest):
            return digest
        self._write(digest, data)
        with self._lock:
            self._durable.discard(digest)
            self._pending.add(digest)
        return digest

    def keep(self, digest: str) -> bool:
        """Returns whether the object exists. If so, `sync()` and `remove_unneeded()` treat it as just stored."""
        path = self.file(digest)
        try:
            if time.time() - path.stat().st_mtime > _YOUNG_SEC:
                os.utime(path)
        except FileNotFoundError:
            return False
        except OSError:
            pass  # the object exists, but in another user's store or on read-only media
        with self._lock:
            if digest not in self._durable:
                self._pending.add(digest)
        return True

    def get(self, digest: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """Returns the uncompressed bytes of an object.

        Raises:
            SnapshotCorruptError: The object is missing or damaged, or does not match its name.
            UnsafeSnapshotError: The object is larger than `max_bytes`.
            SnapshotMetadataError: `digest` is not a digest.
        """
        path = self.file(digest)
        data = read_frame(path, max_bytes)
        if hashlib.sha256(data).hexdigest() != digest:
            raise damaged(path, "its content does not match the digest in its name")
        return data

    def size(self, digest: str) -> int:
        """Returns the size of an object on the disk in bytes."""
        path = self.file(digest)
        try:
            return path.lstat().st_size
        except OSError as error:
            raise _unreadable(path, error) from None

    def put_lines(self, lines: Iterable[bytes], *, cut_after: Callable[[bytes], bool] | None = None) -> tuple[str, ...]:
        """Stores lines in a small number of objects. Similar sequences of lines share most of their objects.

        Args:
            lines: Lines without line ends.
            cut_after: Function that returns whether a line is the last line in its object. Default: objects of slightly
                more than 32 KiB, which suits lists that only grow.

        Returns:
            The digests of the objects in order, to pass to `get_lines`.

        Raises:
            CaptureError: A line contains a known secret.
        """
        known, part_bytes = KnownSecrets(), 0
        digests: list[str] = []
        part: list[bytes] = []
        for line in lines:
            part.append(line)
            part_bytes += len(line) + 1
            if part_bytes >= _LINES_BYTES if cut_after is None else cut_after(line):
                digests.append(self._put_part(part, known))
                part, part_bytes = [], 0
        if part:
            digests.append(self._put_part(part, known))
        return tuple(digests)

    def _put_part(self, lines: list[bytes], known: KnownSecrets) -> str:
        data = b"\n".join(lines) + b"\n"
        if data.count(b"\n") != len(lines):
            raise ValueError("Expected lines without line breaks.")
        if known.found_in(data):
            raise CaptureError(
                "The agent's messages or journal contain a secret: a protected value, or the value of a sensitive "
                "environment variable. Keep secrets out of the container and the conversation."
            )
        return self.put(data)

    def get_lines(
        self, digests: Iterable[str], *, max_lines: int = MAX_LINES, max_bytes: int = MAX_LINES_BYTES
    ) -> list[bytes]:
        """Reads lines that were stored with `put_lines`, which returned `digests`.

        Raises:
            SnapshotCorruptError: An object is missing, damaged, or does not consist of lines.
            UnsafeSnapshotError: The lines exceed `max_lines` or `max_bytes`.
        """
        lines: list[bytes] = []
        for digest in digests:
            data = self.get(digest, max_bytes=min(max_bytes, MAX_OBJECT_BYTES))
            max_bytes -= len(data)
            if not data.endswith(b"\n"):
                raise SnapshotCorruptError(f"{self.file(digest)} is incomplete: its last line has no newline.")
            if len(lines) + data.count(b"\n") > max_lines:
                raise UnsafeSnapshotError(f"{self.file(digest)} exceeds the limit of {max_lines} lines.")
            lines += data[:-1].split(b"\n")
        return lines

    def sync(self) -> None:
        """Writes all objects that were put since the last `sync()` to the disk, so that they survive a power cut."""
        with self._syncing:
            with self._lock:
                pending, self._pending = self._pending, set()
            if not pending:
                return
            files = [self.file(digest) for digest in pending]
            try:
                with ThreadPoolExecutor(_SYNC_THREADS, "ares-exp-sync") as pool:
                    list(pool.map(_sync, files))
                    list(pool.map(_sync, {file.parent for file in files}))
                for directory in (files[0].parent.parent, self.path, self.path.parent):
                    _sync(directory)
            except BaseException:
                with self._lock:
                    self._pending |= pending
                raise
            with self._lock:
                self._durable |= pending

    def digests(self) -> Iterator[str]:
        for file in (self.path / "objects").glob("??/*"):
            if DIGEST.fullmatch(digest := file.parent.name + file.name):
                yield digest

    def remove_unneeded(self, needed: Collection[str], *, older_than_sec: float) -> tuple[int, int]:
        """Removes objects that no snapshot needs, and temporary files of killed processes.

        Args:
            needed: Digests of the objects to keep.
            older_than_sec: Minimum number of seconds since the last `put` or `keep` of a removed object. Younger
                objects may belong to an unfinished snapshot.

        Returns:
            Number of removed objects, and their size on the disk in bytes.
        """
        before, count, size = time.time() - older_than_sec, 0, 0
        for digest in self.digests():
            if digest not in needed and (found := self._remove(self.file(digest), before)) is not None:
                count, size = count + 1, size + found
                with self._lock:
                    self._pending.discard(digest)
                    self._durable.discard(digest)
        for leftover in self._temporary.glob("*"):
            self._remove(leftover, before)
        return count, size

    def _remove(self, file: Path, before: float) -> int | None:
        """Removes a file, unless it was modified after `before`. Returns its size, or `None` if it was not removed."""
        aside = self._temporary / secrets.token_hex(16)
        try:
            if file.stat().st_mtime > before:
                return None
            # Move first: another process may put the object at the same time, and must not find it before it is
            # deleted.
            file.rename(aside)
            found = aside.stat()
            if found.st_mtime > before:
                aside.rename(file)
                return None
            aside.unlink()
        except FileNotFoundError:
            return None
        return found.st_size

    def file(self, digest: str) -> Path:
        """Returns the path of the object with this digest. The object need not exist."""
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise SnapshotMetadataError(f"Expected a sha256 digest of 64 hexadecimal digits, got {str(digest)[:80]!r}.")
        return self.path / "objects" / digest[:2] / digest[2:]

    @property
    def _temporary(self) -> Path:
        return self.path / "objects" / "tmp"

    def _is_whole(self, digest: str, data: bytes) -> bool:
        """Returns whether the object's file exists and contains `data`. After a power cut, the file may be empty."""
        try:
            return read_frame(self.file(digest), len(data)) == data
        except SnapshotMetadataError:
            return False

    def _write(self, digest: str, data: bytes) -> None:
        target, temporary = self.file(digest), self._temporary / secrets.token_hex(16)
        frame = compressed(data)
        for folder in (temporary.parent, target.parent):
            folder.mkdir(parents=True, exist_ok=True)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with open(file, "wb") as opened:  # noqa: PTH123
                opened.write(frame)
            temporary.rename(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
