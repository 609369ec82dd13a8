"""The storage of a run. It reserves disk space in advance, and ends the run after the first failed write."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

from ares_exp.errors import ConfigError, StorageError
from ares_exp.records.run_dir import RunDir, resume_command

RESERVE_BYTES = 2**20
"""Disk space in bytes that a run reserves for its summary files."""
RESERVE_BYTES_PER_EPISODE = 2**16
"""Additional disk space, in bytes, per concurrent episode for its last response, its row and the end of its trajectory.
"""
PROBE_BYTES = 2**16

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOST_MOUNT = (errno.EIO, errno.ENODEV, errno.ENOTCONN, errno.ENXIO, errno.ESTALE)
_STORAGE_ERRORS = (*_DISK_FULL, *_LOST_MOUNT, errno.EFBIG, errno.EROFS)
"""Error numbers that indicate a problem with the disk or mount instead of a single file."""

T = TypeVar("T")


class RunStorage:
    """Writes records of a run, and ends the run when its disk fails. Thread-safe.

    After the first failed write, the run sends no more requests and starts no more episodes. Disk space that the run
    reserved at its start is then freed. Late responses, rows and totals can therefore still be written to a full disk.
    The reserve is an open file without a name, which the kernel deletes if the process is killed.

    Attributes:
        failure: The error that ended the run; `None` while the run can be recorded.
    """

    def __init__(self, run_dir: RunDir, on_failure: Callable[[StorageError], None] = lambda failure: None) -> None:
        self.failure: StorageError | None = None
        self._run_dir = run_dir
        self._on_failure = on_failure
        self._rows: os.stat_result | None = None
        self._reserve: IO[bytes] | None = None
        self._failing = threading.Lock()

    def open(self, *, concurrency: int) -> None:
        """Reserves disk space, and stores the identity of `episodes.jsonl` to detect its removal. Blocking.

        Raises:
            ConfigError: The disk has no space for the reserve, or the directory cannot be written.
        """
        needed = RESERVE_BYTES + concurrency * RESERVE_BYTES_PER_EPISODE
        try:
            self._rows = self._run_dir.episodes.stat()
            self._reserve = reserve = tempfile.TemporaryFile(dir=self._run_dir.path, buffering=0)  # noqa: SIM115
            for start in range(0, needed, 2**20):
                size = min(2**20, needed - start)
                if reserve.write(os.urandom(size)) < size:  # zeros use no space in some file systems
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.close()
            raise ConfigError(
                f"Cannot reserve {needed / 2**20:.1f} MiB of free disk space in the run directory "
                f"{self._run_dir.path}: {error.strerror}. Free some space, make the directory writable, or "
                "use another disk."
            ) from None

    def close(self) -> None:
        """Frees the reserved disk space. Idempotent."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            with suppress(OSError):
                reserve.close()

    def check(self) -> None:
        """Raises `StorageError` if a write of the run has failed, or if the run directory is missing."""
        if self.failure is None and (missing := self._missing()) is not None:
            self.fail(missing, self._run_dir.path)
        if self.failure is not None:
            raise self.failure

    def write(self, write: Callable[[], T], path: Path | str) -> T:
        """Calls `write`, which writes a record atomically. If this fails, ends the run and calls `write` once more.

        The second call has more disk space, because the end of the run frees the reserve. `path` is for the error
        message.

        Raises:
            StorageError: The record could not be written.
        """
        try:
            return self._written(write)
        except OSError as error:
            failure = self.fail(error, path)
        try:
            return self._written(write)
        except OSError:
            raise failure from None

    def _written(self, write: Callable[[], T]) -> T:
        if (missing := self._missing()) is not None:  # the write would create the directory again
            raise missing
        written = write()
        if (missing := self._missing()) is not None:
            raise missing
        return written

    def probe(self) -> None:
        """Tests whether the run directory is writable, with a temporary file. If it is not, ends the run. Blocking."""

        def write() -> None:
            with tempfile.TemporaryFile(dir=self._run_dir.path) as file:
                file.write(os.urandom(PROBE_BYTES))

        if self.failure is None:
            with suppress(StorageError):
                self.write(write, self._run_dir.path)

    def causes(self, error: BaseException) -> bool:
        """Returns whether a failed disk or mount, or a missing run directory, caused `error`. If so, ends the run."""
        for cause in _chain(error):
            if isinstance(cause, OSError) and (cause.errno in _STORAGE_ERRORS or self._missing() is not None):
                self.fail(cause, self._run_dir.path)
                return True
        return False

    def fail(self, error: OSError, path: Path | str) -> StorageError:
        """Ends the run because of a failed write, and returns the error to raise. Later calls return the same error."""
        with self._failing:
            if self.failure is not None:
                return self.failure
            self.failure = failure = StorageError(self._message(error, error.filename or path))
        self.close()
        self._on_failure(failure)
        return failure

    def _missing(self) -> OSError | None:
        """Returns an error if `episodes.jsonl` is not the file that `open` found, as after an unmount.

        Returns `None` if it is still the same file.
        """
        if self._rows is None:
            return None
        try:
            if os.path.samestat(self._rows, os.stat(self._run_dir.episodes)):  # noqa: PTH116 - for each request
                return None
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            return error
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._run_dir.path))

    def _message(self, error: OSError, path: Path | str) -> str:
        run_dir = self._run_dir.path
        resume = f"`{resume_command(run_dir)}`"
        if self._missing() is not None:
            return (
                f"The run stops because its directory {run_dir} was deleted, moved or unmounted: "
                f"{error.strerror}. If you can restore it, continue with {resume}. Otherwise, start the run "
                "again."
            )
        fix = "Free some disk space" if error.errno in _DISK_FULL else "Make it writable again"
        return f"The run stops because it cannot write {path}: {error.strerror}. {fix}, then continue with {resume}."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields `error`, then the exceptions that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
