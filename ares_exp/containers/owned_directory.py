"""Temporary directories removed with the process that made them, or by the next run if it was killed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal, get_args

from ares_exp.cancellation import finish
from ares_exp.containers.leftover import Leftover

_UNLOCKED_SEC = 60.0  # far longer than a new directory lacks its lock
ShortLived = Literal["build", "fork", "host", "transfer", "verifier", "wandb"]
"""Purposes of such directories; part of their names."""


def name_prefix(purpose: str) -> str:
    """Returns the name prefix of directories for a purpose; the process number of the maker follows it."""
    return f"ares_exp-{purpose}-"


class OwnedDirectory:
    """A temporary directory, locked while the process that made it lives.

    The lock is the kernel's (`flock` on the directory): it ends with the process, however that dies, and works across
    pid namespaces, where a process number means nothing.
    """

    def __init__(self, prefix: str, folder: Path | None = None) -> None:
        """Creates the directory, readable only by this user.

        Args:
            prefix: Name prefix: `name_prefix` of a purpose and the process number, at least.
            folder: Its parent; `None`: the directory of temporary files.

        Raises:
            OSError: It cannot be created.
        """
        fresh = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=folder))
        self._lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Renamed only once it is locked: a cleanup takes an unlocked one for stale.
        self.path = fresh.rename(fresh.with_name(fresh.name[1:]))

    def remove(self) -> None:
        """Deletes it with its contents. Idempotent."""
        self._delete()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _delete(self) -> None:
        delete(self.path)


@contextmanager
def locked(path: str | Path, flags: int, *, dir_fd: int | None = None) -> Iterator[int]:
    """Opens a file or directory as `os.open` does, and holds its lock; yields the descriptor.

    Raises:
        OSError: It cannot be opened or locked; `BlockingIOError` if another process holds the lock.
    """
    descriptor = os.open(path, flags, dir_fd=dir_fd)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


def short_lived_directory(purpose: ShortLived) -> OwnedDirectory:
    """Creates a directory for one piece of work; the caller removes it afterwards.

    Raises:
        OSError: It cannot be created.
    """
    return OwnedDirectory(f"{name_prefix(purpose)}{os.getpid()}-")


@asynccontextmanager
async def working_directory(purpose: ShortLived) -> AsyncIterator[Path]:
    """Provides a `short_lived_directory` for the body; removed however the body ends.

    Raises:
        OSError: It cannot be created.
    """
    making = asyncio.ensure_future(asyncio.to_thread(short_lived_directory, purpose))
    try:
        await finish(asyncio.wait({making}))  # also when the caller is cancelled: the directory has to be removed
        yield making.result().path
    finally:
        if not making.cancelled() and making.exception() is None:
            await finish(asyncio.to_thread(making.result().remove))


def delete(path: Path) -> bool:
    """Deletes a directory; returns whether it is gone."""
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def find_short_lived() -> Iterator[Leftover]:
    """Yields this user's directories of each purpose, those of running processes included. Blocking."""
    for purpose in get_args(ShortLived):
        yield from find(purpose, "directory", delete, [Path(tempfile.gettempdir())])


def find(purpose: str, kind: str, delete: Callable[[Path], bool], folders: Iterable[Path]) -> Iterator[Leftover]:
    """Yields this user's directories for a purpose, those of running processes included. Blocking.

    Args:
        purpose: As in their names.
        kind: Their `Leftover.kind`.
        delete: Deletes one; returns whether it is gone.
        folders: Their possible parents.
    """
    prefix = name_prefix(purpose)
    for path in (
        path for folder in folders for path in sorted([*folder.glob(f"{prefix}*"), *folder.glob(f".{prefix}*")])
    ):
        try:
            status = path.lstat()
        except OSError:
            continue
        if status.st_uid != os.geteuid():
            continue
        pid = re.match(r"\d+", path.name.partition(prefix)[2])
        yield Leftover(
            kind=kind,
            name=str(path),
            whose=f"process {pid[0] if pid else 'unknown'}",
            is_stale=_when_stale(path),
            created=status.st_mtime,
            remove=lambda path=path: _remove(path, delete),  # type: ignore[misc]
        )


def _when_stale(path: Path, then: Callable[[Path], bool] | None = None) -> bool:
    """Returns whether the process that made it is dead; `then` deletes it under the lock."""
    try:
        with locked(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
            found = os.fstat(descriptor)
            is_fresh = path.name.startswith(".") and time.time() - found.st_mtime < _UNLOCKED_SEC
            return not is_fresh and found.st_uid == os.geteuid() and (then is None or then(path))
    except OSError:
        return False


def _remove(path: Path, delete: Callable[[Path], bool]) -> str:
    return "" if _when_stale(path, delete) or not path.exists() else "something in it is still in use"
