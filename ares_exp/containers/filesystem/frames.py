"""One object as a file: a zstd frame that says how many bytes it holds. What is read is untrusted, and bounded."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

from ares_exp.errors import SnapshotCorruptError, UnsafeSnapshotError

_LEVEL = 3
_REMEDY = "Restore it from a copy of the store, or use another snapshot."
_codecs = threading.local()  # a compressor serves one thread at a time


def compressed(data: bytes) -> bytes:
    """Returns the frame."""
    from ares_exp.containers.filesystem.zstd import zstd

    if not hasattr(_codecs, "compressor"):
        _codecs.compressor = zstd.ZstdCompressor(level=_LEVEL)
    # A whole frame in one call: its header has the size of the content.
    frame: bytes = _codecs.compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
    return frame


def frame_size(path: Path) -> int:
    """Returns its size on the disk, bytes.

    Raises:
        SnapshotCorruptError: It is missing.
    """
    try:
        return path.lstat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None


def read_frame(path: Path, max_bytes: int) -> bytes:
    """Reads the content of a frame.

    Raises:
        SnapshotCorruptError: It is missing or damaged.
        UnsafeSnapshotError: It holds more than `max_bytes`.
    """
    from ares_exp.containers.filesystem.zstd import zstd

    frame = _read(path, max_bytes)
    decompressor = zstd.ZstdDecompressor()
    try:
        size = zstd.get_frame_info(frame).decompressed_size
        if size is None:
            raise damaged(path, "its header has no size")
        if size > max_bytes:
            raise UnsafeSnapshotError(f"Expected {path} to hold at most {max_bytes} bytes, it says {size}.")
        data = decompressor.decompress(frame, max_length=size + 1)  # bounds the memory, whatever the frame holds
    except zstd.ZstdError as error:
        raise damaged(path, str(error)) from None
    if not decompressor.eof:
        raise damaged(path, f"it ends after {len(data)} of {size} bytes")
    if decompressor.unused_data:
        raise damaged(path, f"it has {len(decompressor.unused_data)} bytes after its end")
    return data


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        # Neither a link nor a fifo may be in its place.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise damaged(path, "it is no file")
        limit = max_bytes + max_bytes // 128 + 1024  # zstd adds less to what it cannot compress
        if found.st_size > limit:
            raise UnsafeSnapshotError(f"Expected {path} to have at most {limit} bytes, found {found.st_size}.")
        return os.read(file, found.st_size)
    except OSError as error:
        raise _unreadable(path, error) from None
    finally:
        os.close(file)


def damaged(path: Path, why: str) -> SnapshotCorruptError:
    """Returns the error for a damaged object."""
    return SnapshotCorruptError(f"{path} is damaged: {why}. {_REMEDY}")


def _unreadable(path: Path, error: OSError) -> SnapshotCorruptError:
    if isinstance(error, FileNotFoundError):
        return SnapshotCorruptError(f"{path} is missing. {_REMEDY}")
    return SnapshotCorruptError(f"{path} cannot be read: {error.strerror}. {_REMEDY}")
