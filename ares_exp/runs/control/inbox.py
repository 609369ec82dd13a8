"""The inbox of a run: orders read from a folder whose content is not trusted."""

from __future__ import annotations

import itertools
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ares_exp.records.beneath import DIRECTORY_FLAGS
from ares_exp.runs.control.orders import MAX_BYTES, WATCHED, Order

MAX_TAKEN = 200
"""Files that are read at once; the others are read the next time."""
MAX_LISTED = 5_000
MAX_REMEMBERED = 10_000
WATCHED_SEC = 10.0


@dataclass(frozen=True, slots=True)
class OrderFile:
    """A file of the inbox.

    Attributes:
        name: Its name.
        order: The order; `None` if the file is not one.
        uid: User id of the file's owner; `None` if the order has no file.
        problem: Why the file is not an order.
    """

    name: str
    order: Order | None = None
    uid: int | None = None
    problem: str = ""


class Inbox:
    """Takes each order once, the oldest first. Links, pipes, large and broken files are rejected, each once.

    Names with a leading dot are skipped: another process may be writing these files.
    """

    def __init__(self, folder: Path, *, is_shared: bool = False) -> None:
        """Keeps the arguments; does not touch the folder.

        Args:
            folder: The folder with the orders.
            is_shared: Whether the jobs of a sweep share these orders. Then the files are not removed.
        """
        self.folder = folder
        self._is_shared = is_shared
        self._known: dict[str, None] = {}

    def take(self) -> list[OrderFile]:
        """Returns the new files, a bounded number of them. Blocking."""
        try:
            directory = os.open(self.folder, DIRECTORY_FLAGS)
        except FileNotFoundError:
            return []
        except OSError as error:
            if self.folder.name in self._known:
                return []
            self._remember(self.folder.name)
            return [OrderFile(self.folder.name, problem=f"it is not a folder: {error.strerror}")]
        try:
            with os.scandir(directory) as entries:
                names = [entry.name for entry in itertools.islice(entries, MAX_LISTED)]
            new = sorted(name for name in names if name[0] != "." and name not in self._known)
            return [found for name in new[:MAX_TAKEN] if (found := self._take(directory, name)) is not None]
        finally:
            os.close(directory)

    def forget(self) -> None:
        """Removes the orders of an earlier session. Blocking."""
        for _ in range(MAX_LISTED // MAX_TAKEN):
            if not self.take():
                return

    @property
    def is_watched(self) -> bool:
        """Whether another process reads the state of the run now. Blocking."""
        with suppress(OSError):
            return time.time() - (self.folder / WATCHED).lstat().st_mtime < WATCHED_SEC
        return False

    def _take(self, directory: int, name: str) -> OrderFile | None:
        try:
            data, uid = _read(directory, name)
            found = OrderFile(name, Order.parse(data), uid)
        except FileNotFoundError:  # its author has removed it
            return None
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            found = OrderFile(name, problem=problem or type(error).__name__)
        if self._is_shared or not _remove(directory, name):
            self._remember(name)
        return found

    def _remember(self, name: str) -> None:
        self._known[name] = None
        while len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]


def _read(directory: int, name: str) -> tuple[bytes, int]:
    """Reads a small regular file; returns its content and the user id of its owner.

    Raises:
        OSError: The file cannot be read. Links are not followed.
        ValueError: The file is not a regular file, or too large.
    """
    if not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        raise ValueError("expected a regular file")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=directory), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("expected a regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES:,} bytes")
    return data, found.st_uid


def _remove(directory: int, name: str) -> bool:
    """Removes a file or an empty folder; returns whether it is gone."""
    for remove in (os.unlink, os.rmdir):
        with suppress(OSError):
            remove(name, dir_fd=directory)
            return True
    return False
