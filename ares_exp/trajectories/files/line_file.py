"""Reading of text files by line, with size limits, and atomic writing. Files can be compressed (`.zst`)."""

from __future__ import annotations

import fcntl
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, cast

from ares_exp.records.run_dir import atomic_file, open_regular, try_lock

ZSTD = ".zst"
MAX_FILE_BYTES = 4 * 1024**3
MAX_LINE_BYTES = 256 * 1024**2
TAIL_BYTES = 4096
"""Number of bytes that are read from the end of a file to find the start of its last line. If this is not enough, each
further attempt reads four times as many bytes."""


class Line(NamedTuple):
    """A line of a file. `offset` counts the bytes of the uncompressed text before it. `number` is 0 if unknown."""

    offset: int
    number: int
    text: str

    @property
    def place(self) -> str:
        """The position of the line as text, such as `at byte 120 (line 3)`."""
        return _place(self.offset, self.number)


@contextmanager
def read_lines(path: Path, *, offsets: Sequence[int] | None = None) -> Iterator[Iterator[Line]]:
    """Opens a file, and yields an iterator over its lines. Files named `….zst` are decompressed.

    Args:
        path: The file.
        offsets: Byte offsets of the lines to read, in ascending order. By default, all lines are read.

    Raises:
        OSError: The file cannot be read or decompressed.
        ValueError: A line is not UTF-8, a compressed file is incomplete, or a size limit is exceeded. Raised while
            iterating.
    """
    with open_regular(path) as raw, _decompressed(raw, path) as file:
        if offsets is None:
            yield _lines(file)
        else:
            yield (_line_at(file, offset) for offset in offsets)


def first_and_last_line(path: Path) -> tuple[Line, Line]:
    """Reads only the first and the last line of a file. Raises the same errors as `read_lines`."""
    with open_regular(path) as raw, _decompressed(raw, path) as file:
        lines = _lines(file)
        first = next(lines, Line(0, 1, ""))
        if path.suffix == ZSTD:
            last = deque(lines, maxlen=1)
            return first, last[0] if last else first
        starts = _last_line_starts(raw, after=raw.tell())
        return first, first if starts is None else _line_at(raw, starts)


def read_rest(lines: Iterator[Line]) -> str:
    """Returns the remaining lines of a file as one string. Raises `ValueError` if it is too long for one line."""
    texts, length = [], 0
    for line in lines:
        texts.append(line.text)
        length += len(line.text)
        if length > MAX_LINE_BYTES:
            raise ValueError(f"the JSON object is longer than the limit of {MAX_LINE_BYTES} bytes")
    return "".join(texts)


def _lines(file: IO[bytes]) -> Iterator[Line]:
    offset = number = 0
    while data := _read_line(file, offset, number := number + 1):
        if offset + len(data) > MAX_FILE_BYTES:
            raise ValueError(f"the file is longer than the limit of {MAX_FILE_BYTES} bytes")
        yield Line(offset, number, _text(data, offset, number))
        offset += len(data)


def _line_at(file: IO[bytes], offset: int) -> Line:
    file.seek(offset)
    return Line(offset, 0, _text(_read_line(file, offset, 0), offset, 0))


def _read_line(file: IO[bytes], offset: int, number: int) -> bytes:
    data = file.readline(MAX_LINE_BYTES + 1)
    if len(data) > MAX_LINE_BYTES:
        raise ValueError(f"the line {_place(offset, number)} is longer than the limit of {MAX_LINE_BYTES} bytes")
    return data


def _last_line_starts(file: IO[bytes], *, after: int) -> int | None:
    """Returns the offset of the last line; `None` if the file ends at or before the offset `after`."""
    size = file.seek(0, os.SEEK_END)
    if size <= after:
        return None
    length = TAIL_BYTES
    while True:
        at = max(after, size - length)
        file.seek(at)
        data = file.read(size - at)
        if (cut := data.rfind(b"\n", 0, len(data) - 1)) >= 0:
            return at + cut + 1
        if at == after or length > MAX_LINE_BYTES:
            return at
        length *= 4


def _text(data: bytes, offset: int, number: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":  # the last line is incomplete
            return data[: error.start].decode()
        raise ValueError(f"it is not valid UTF-8 {_place(offset + error.start, number)}") from None


def _place(offset: int, number: int) -> str:
    return f"at byte {offset} (line {number})" if number else f"at byte {offset}"


@contextmanager
def _decompressed(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.suffix != ZSTD:
        yield raw
        return
    from ares_exp.containers.filesystem.zstd import zstd

    bounds: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 27}
    try:
        with zstd.ZstdFile(raw, options=bounds) as stream:
            yield cast("IO[bytes]", stream)
    except zstd.ZstdError as error:
        raise OSError(None, f"it cannot be decompressed: {error}") from error
    except EOFError:
        raise ValueError("the compressed data is incomplete") from None


def write_lines(path: Path, lines: Iterable[str], *, sync: bool = True) -> None:
    """Writes a file atomically (see `atomic_file`). Files named `….zst` are compressed."""
    with atomic_file(path, sync=sync) as file:
        if path.suffix == ZSTD:
            from ares_exp.containers.filesystem.zstd import zstd

            with zstd.ZstdFile(file, "w", level=9) as stream:
                stream.write(b"")  # makes a valid file even without lines
                for line in lines:
                    stream.write(line.encode())
        else:
            file.writelines(map(str.encode, lines))


ASKING_LIMIT_SEC = 1.0
"""Maximum time in seconds that a writer waits for its lock. Calls of `has_writer` in other processes can delay it,
because they lock the file for a moment. After this time, the writer continues without a lock."""


CHECK_SEC = 0.005
"""Time in seconds for which `has_writer` tries to lock a file, because another process may also be checking it."""


class WriterLock:
    """A shared lock which shows other processes that a file or directory is being written (see `has_writer`).

    Several writers of this process, such as open episodes, share the lock. The last writer releases it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[str] = set()
        self._descriptor: int | None = None

    def acquire(self, path: Path, holder: str) -> None:
        """Adds the writer `holder`. The first writer locks `path`, or raises `OSError` if `path` is missing."""
        with self._lock:
            if self._descriptor is None:
                descriptor = os.open(path, os.O_RDONLY)
                with suppress(OSError):  # the file system has no such locks
                    try_lock(descriptor, fcntl.LOCK_SH, wait_sec=ASKING_LIMIT_SEC)
                self._descriptor = descriptor
            self._holders.add(holder)

    def release(self, holder: str) -> None:
        """Removes the writer `holder`, if it exists. Releases the lock if no writer is left."""
        with self._lock:
            self._holders.discard(holder)
            if not self._holders and self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def has_writer(path: Path) -> bool:
    """Returns whether a process holds a `WriterLock` on `path`. Raises `OSError` if `path` is missing.

    Always returns true if the file system does not support locks.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not try_lock(descriptor, fcntl.LOCK_EX, wait_sec=CHECK_SEC)
    except OSError:
        return True
    finally:
        os.close(descriptor)
