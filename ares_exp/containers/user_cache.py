"""The user's cache directory, with files that a run downloaded or created and that later runs use again.

A process locks the folders that it uses (`hold`). `ares-exp clean --cache` empties only folders without such a lock.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ares_exp.containers.ownership import Leftover, OwnedDirectory, delete, find_directories, locked, name_prefix

_POLL_SEC = 0.2

logger = logging.getLogger(__name__)

_held: dict[tuple[int, int], int] = {}
"""Open descriptors of this process's locks, by the folder's device and inode. They stay open until the process ends."""


def user_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/ares_exp`, or `~/.cache/ares_exp` if the variable is not set."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative path must be ignored
    return (home if home.is_absolute() else Path.home() / ".cache") / "ares_exp"


def announce(sentence: str) -> None:
    """Reports a download before it starts, on stderr and in the log."""
    logger.info("%s", sentence)
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def hold(folder: Path) -> None:
    """Locks a folder, so that `ares-exp clean` does not empty it until this process ends. Waits for a running `clean`.

    Creates the folder if it is missing. On a file system without locks, the folder is not protected. Blocking.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity not in _held:
            descriptor = _held[identity] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)


@contextmanager
def workspace(folder: Path, purpose: str) -> Iterator[Path]:
    """Creates a temporary directory in a cache folder. Callers write new files there, and then rename them.

    Also removes temporary directories that killed processes left there for the same purpose.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hold(folder)
    directory = OwnedDirectory(f"{name_prefix(purpose)}{os.getpid()}-", folder.resolve())
    try:
        for leftover in find_directories(purpose, delete, [folder]):
            if leftover.is_stale:
                leftover.remove()
        yield directory.path
    finally:
        directory.remove()


@contextmanager
def changing(path: Path, *, stop: threading.Event, timeout_sec: float) -> Iterator[None]:
    """Locks a file or folder of the cache during the `with` block. Waits for other processes and threads. Blocking.

    Raises `TimeoutError` if it still waits for the lock after `timeout_sec`, or when `stop` is set.
    """
    deadline = time.monotonic() + timeout_sec
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(path, os.O_RDONLY if path.is_dir() else os.O_RDWR))  # NFS needs write access
                break
            except BlockingIOError:
                if stop.wait(_POLL_SEC) or time.monotonic() > deadline:
                    raise TimeoutError(f"Another process is changing {path}.") from None
        yield


def find_caches() -> Iterator[Leftover]:
    """Yields the non-empty folders of this user's cache directory as leftovers. Blocking."""
    try:
        folders = sorted(path for path in user_cache_dir().iterdir() if path.is_dir())
    except OSError:
        return
    for folder in folders:
        with suppress(OSError):
            if folder.stat().st_uid == os.geteuid() and any(folder.iterdir()):
                is_free = _when_free(folder) == ""
                yield Leftover(
                    kind="cache",
                    name=str(folder),
                    whose="no run (kept for the next run)" if is_free else "a process that uses it",
                    is_stale=is_free,
                    created=None,
                    remove=functools.partial(_when_free, folder, empty=True),
                    size=_size(folder),
                )


def _when_free(folder: Path, *, empty: bool = False) -> str:
    """Checks that no process uses a folder, and empties it if `empty` is true. Returns why this failed, or `""`."""
    try:
        with locked(folder, os.O_RDONLY | os.O_DIRECTORY):
            return _empty(folder) if empty else ""  # keep the folder: processes that wait for its lock will use it
    except OSError as error:
        return "a process uses it" if isinstance(error, BlockingIOError) else str(error.strerror)


def _empty(folder: Path) -> str:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            delete(path)
        else:
            path.unlink()
    return "some of its files cannot be removed" if any(folder.iterdir()) else ""


def _size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH118  # many of them
    return total
