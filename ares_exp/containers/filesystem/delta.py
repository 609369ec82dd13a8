"""The delta: all paths at which a container's files differ from its base, including deleted paths.

The base is the image or host system that the container started from. The content of a file is stored as chunks in an
`ObjectStore`. Holes are not read, and chunks of zeros are not stored. If a file contains a known secret, the capture
fails.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Literal

from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.errors import CaptureError, SnapshotCorruptError
from ares_exp.records.secrets import KnownSecrets

EntryKind = Literal["file", "directory", "symlink", "fifo", "whiteout"]

UNKEPT_DIRECTORIES = ("/dev/", "/proc/", "/sys/")
"""Directories whose contents come from the kernel or the engine. A delta contains no paths below them."""

MAX_MTIME_NS = 2**40 * 10**9
"""Maximum absolute value of `Entry.mtime_ns`: 35 thousand years, more than any file system on disk can store."""

MAX_PATH_BYTES = 4095
MAX_NAME_BYTES = 255

MAX_ENTRIES = 1_000_000
MAX_BYTES = 16 * 2**30
"""Maximum total size of a delta's files in bytes. Chunks of zeros count, and each hard link counts as a file."""

MAX_NOTES = 1000
"""Maximum number of notes of a delta. Further notes are dropped."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A changed path: a file, directory, link or FIFO, or a deletion. Devices and sockets are not captured.

    Attributes:
        kind: Kind of the entry. `"whiteout"` means that the container has deleted a path of the base.
        mode: Permission bits, 0 to 0o7777; 0 for symlinks and whiteouts.
        uid, gid: Owner, as numbers.
        mtime_ns: Nanoseconds since the epoch; may be negative.
        size: Size of a file in bytes.
        chunks: Digests of the file's chunks. Each chunk has `CHUNK_BYTES` bytes, except for the last, which may be
            shorter. `None` is a chunk of zeros.
        target: Target of a symlink.
        xattrs: Extended attributes of a file or directory: `user.*` and `security.capability`.
        opaque: Whether a directory replaces the base's directory, so that none of the base's files in it are visible.
        link: Number that all names (hard links) of the same file share; `None` if the file has only one name.
    """

    kind: EntryKind
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    chunks: tuple[str | None, ...] = ()
    target: str = ""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    opaque: bool = False
    link: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """The differences between a container's files and the base that it started from.

    Attributes:
        base: Base of the delta: `"sha256:…"` is the id of an image, `"host:…"` describes the host's system, and
            `"daytona:…"` names a snapshot of the Daytona service.
        entries: Entries by absolute path, parents before children. Paths are decoded with `os.fsdecode`, which keeps
            any bytes. Every directory above an entry also has an entry, except `/`.
        notes: Messages for people about content that is missing or may be inconsistent (sockets, a file that changed
            while it was read, …).
    """

    base: str
    entries: Mapping[str, Entry]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredChanges:
    """A delta, and the object store that contains the contents of its files."""

    delta: Delta
    objects: ObjectStore


def add_note(notes: list[str], text: str) -> None:
    """Adds a note of a delta, unless there are already `MAX_NOTES` notes."""
    if len(notes) < MAX_NOTES:
        notes.append(text)


def is_kept(path: str) -> bool:
    """Returns whether a delta may contain this path, because it is not below `UNKEPT_DIRECTORIES`."""
    return not f"{path}/".startswith(UNKEPT_DIRECTORIES)


def is_kept_xattr(name: str) -> bool:
    """Returns whether a delta includes this extended attribute. Others are valid only in this container or host."""
    if name.startswith("user."):
        return len(name) > len("user.") and not name.startswith("user.overlay.")
    return name == "security.capability"


def link_number(first_name: str) -> int:
    """Computes `Entry.link` of a hard-linked file from `first_name`, the first of its paths in sorted order."""
    return int.from_bytes(hashlib.sha256(os.fsencode(first_name)).digest()[:6])


def differences(a: Delta, b: Delta) -> list[str]:
    """Returns the differences between two deltas, one line per path and field; empty if they are equivalent.

    Link numbers may differ if the same paths are hard links of the same file. Notes are not compared.
    """
    lines = [] if a.base == b.base else [f"base: {a.base} != {b.base}"]
    names = [_names_of_links(delta.entries) for delta in (a, b)]
    for path in sorted(a.entries.keys() | b.entries.keys()):
        one, other = a.entries.get(path), b.entries.get(path)
        if one is None or other is None:
            lines.append(f"{path!r}: only in the {'second' if one is None else 'first'}")
            continue
        for name in Entry.__slots__:
            pair = (
                [names[i].get(entry.link) for i, entry in enumerate((one, other))]
                if name == "link"
                else [getattr(one, name), getattr(other, name)]
            )
            if pair[0] != pair[1]:
                lines.append(f"{path!r}: {name}: {_short(pair[0])} != {_short(pair[1])}")
    return lines


def _names_of_links(entries: Mapping[str, Entry]) -> dict[int | None, tuple[str, ...]]:
    names: dict[int | None, tuple[str, ...]] = {}
    for path in sorted(path for path, entry in entries.items() if entry.link is not None):
        names[entries[path].link] = (*names.get(entries[path].link, ()), path)
    return names


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:90]} … {text[-90:]}"


def sorted_by_path(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries sorted by path, so that parents come before children."""
    return {path: entries[path] for path in sorted(entries, key=os.fsencode)}


def parents(path: str) -> Iterator[str]:
    """Yields the parent directories of a path, nearest first, excluding the root `/`."""
    while path := path.rpartition("/")[0]:
        yield path


def in_directories(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries sorted by path, without entries whose parent directory was removed during the read."""
    found: dict[str, Entry] = {}
    for path, entry in sorted_by_path(entries).items():
        parent = path.rpartition("/")[0]
        if not parent or (parent in found and found[parent].kind == "directory"):
            found[path] = entry
    return found


_ZEROS = bytes(CHUNK_BYTES)
_AHEAD = 8  # chunks in memory at a time


class FileChangedError(Exception):
    """A file became shorter while it was read."""


class ChunkWriter:
    """Stores the chunks of one file in order, and checks that they contain no known secret."""

    def __init__(self, path: str, objects: ObjectStore, pool: Executor | None, known: KnownSecrets) -> None:
        self._path, self._objects, self._pool, self._known = path, objects, pool, known
        self._chunks: list[str | Future[str] | None] = []
        self._waiting: list[Future[str]] = []
        self._tail = b""

    def add(self, data: bytes) -> None:
        """Adds the next chunk. Only the last chunk may be shorter than `CHUNK_BYTES`.

        Raises `CaptureError` if the chunk contains a known secret, or the end of a secret that started in the previous
        chunk.
        """
        if data == _ZEROS[: len(data)]:
            self.add_zeros()
            return
        if longest := self._known.longest:
            if self._known.found_in(data) or self._known.found_in(self._tail + data[:longest]):
                raise CaptureError(
                    f"{self._path!r} contains a secret: a protected value, or the value of a sensitive environment "
                    "variable of this process. A snapshot would store it on disk. Remove the file, or keep the secret "
                    "out of the container."
                )
            self._tail = data[-longest:]
        if self._pool is None:
            self._chunks.append(self._objects.put(data))
            return
        if len(self._waiting) >= _AHEAD:
            self._waiting.pop(0).result()
        future = self._pool.submit(self._objects.put, data)
        self._waiting.append(future)
        self._chunks.append(future)

    def add_zeros(self, count: int = 1) -> None:
        self._tail = b""
        self._chunks += [None] * count

    def finish(self) -> tuple[str | None, ...]:
        """Waits until all chunks are stored, and returns their digests."""
        return tuple(chunk.result() if isinstance(chunk, Future) else chunk for chunk in self._chunks)


def read_file(writer: ChunkWriter, file: int, size: int) -> tuple[str | None, ...]:
    """Stores the first `size` bytes of an open file with `writer`, and returns the digests of the chunks.

    Raises `CaptureError` if the file contains a known secret, and `FileChangedError` if the file is shorter.
    """
    start = data_start = 0
    while start < size:
        if data_start <= start:
            data_start = _next_data(file, start, size)
        if holes := min(data_start - start, size - start) // CHUNK_BYTES:
            writer.add_zeros(holes)
            start += holes * CHUNK_BYTES
            continue
        if data_start >= size:  # the last chunk, shorter than the others, is a hole
            writer.add_zeros()
            break
        data = _read(file, min(CHUNK_BYTES, size - start), start)
        writer.add(data)
        start += len(data)
    return writer.finish()


def _next_data(file: int, start: int, size: int) -> int:
    try:
        return os.lseek(file, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a hole up to the end
            return size
        if error.errno == errno.EINVAL:  # a file system without support for holes
            return start
        raise


def _read(file: int, count: int, offset: int) -> bytes:
    data = os.pread(file, count, offset)
    while len(data) < count:
        more = os.pread(file, count - len(data), offset + len(data))
        if not more:
            raise FileChangedError
        data += more
    return data


def contents(objects: ObjectStore, path: str, entry: Entry) -> Iterator[bytes | int]:
    """Yields the chunks of a file in order. For a chunk of zeros, yields its length instead of its bytes.

    Raises `SnapshotCorruptError` if an object is missing or damaged, or has a wrong size.
    """
    for number, digest in enumerate(entry.chunks):
        size = min(CHUNK_BYTES, entry.size - number * CHUNK_BYTES)
        if digest is None:
            yield size
            continue
        data = objects.get(digest, max_bytes=CHUNK_BYTES)
        if len(data) != size:
            raise SnapshotCorruptError(
                f"Expected {objects.file(digest)} to contain {size} bytes of {path!r}, got {len(data)}."
            )
        yield data
