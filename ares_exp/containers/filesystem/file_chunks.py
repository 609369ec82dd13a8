"""The content of one file as chunks, and back: holes are not read, zeros not stored, secrets found."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future

from ares_exp.containers.filesystem.delta import Entry
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.errors import CaptureError, SnapshotCorruptError
from ares_exp.records.secrets import KnownSecrets

_ZEROS = bytes(CHUNK_BYTES)
_AHEAD = 8  # chunks in memory at a time


class FileChangedError(Exception):
    """A file ended earlier than its size said."""


class ChunkWriter:
    """Stores the chunks of one file, in order, and looks for secrets in them."""

    def __init__(self, path: str, objects: ObjectStore, pool: Executor | None, known: KnownSecrets) -> None:
        self._path, self._objects, self._pool, self._known = path, objects, pool, known
        self._chunks: list[str | Future[str] | None] = []
        self._waiting: list[Future[str]] = []
        self._tail = b""

    def add(self, data: bytes) -> None:
        """Adds the next chunk: `CHUNK_BYTES`, but for the last one.

        Raises:
            CaptureError: It holds a known secret, or its start ends one.
        """
        if data == _ZEROS[: len(data)]:
            self.add_zeros()
            return
        if longest := self._known.longest:
            if self._known.found_in(data) or self._known.found_in(self._tail + data[:longest]):
                raise CaptureError(
                    f"{self._path!r} holds the value of a sensitive environment variable of this process, or of a "
                    "protected value. A snapshot would keep it on the disk: remove the file, or keep the secret out of "
                    "the container."
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
        """Adds chunks of zeros."""
        self._tail = b""
        self._chunks += [None] * count

    def finish(self) -> tuple[str | None, ...]:
        """Returns the digests, when all are stored."""
        return tuple(chunk.result() if isinstance(chunk, Future) else chunk for chunk in self._chunks)


def read_file(writer: ChunkWriter, file: int, size: int) -> tuple[str | None, ...]:
    """Returns the chunks of the first `size` bytes of an open file.

    Raises:
        CaptureError: It holds a known secret.
        FileChangedError: It ended earlier.
        OSError: It cannot be read.
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
        if error.errno == errno.EINVAL:  # a file system that knows no holes
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
    """Yields the content of a file, in order: the bytes of each chunk, or how many zeros there are in its place."""
    for number, digest in enumerate(entry.chunks):
        size = min(CHUNK_BYTES, entry.size - number * CHUNK_BYTES)
        if digest is None:
            yield size
            continue
        data = objects.get(digest, max_bytes=CHUNK_BYTES)
        if len(data) != size:
            raise SnapshotCorruptError(
                f"Expected {objects.file(digest)} to hold {size} bytes of {path!r}, got {len(data)}."
            )
        yield data
