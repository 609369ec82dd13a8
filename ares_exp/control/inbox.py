"""The inbox of a run: orders read from a folder whose content is not trusted."""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ares_exp.control.orders import LOOK, MAX_BYTES, Order, parse
from ares_exp.filesystem.beneath import DIRECTORY_FLAGS

MOST_AT_ONCE = 200
"""Files that are read at one look; the others at the next."""
MOST_LISTED = 5_000
MOST_REMEMBERED = 10_000
LOOKED_AT_SEC = 10.0


@dataclass(frozen=True, slots=True)
class TakenOrder:
    """An order, and the owner of the file that carried it.

    Attributes:
        order: The order.
        uid: User id of the owner; `None` where no file carried it.
    """

    order: Order
    uid: int | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that is no order.

    Attributes:
        name: Its name.
        why: What is wrong with it.
    """

    name: str
    why: str


class Inbox:
    """Takes each order once, the oldest first; links, pipes, large and broken files are refused, each once.

    A name that begins with a dot is skipped: somebody may be writing it.
    """

    def __init__(self, folder: Path, *, is_shared: bool = False) -> None:
        """Keeps the arguments; touches nothing.

        Args:
            folder: Where orders come.
            is_shared: Whether others take these orders, too, as the jobs of a sweep do: then they stay where they are.
        """
        self.folder = folder
        self._is_shared = is_shared
        self._known: dict[str, None] = {}

    def take(self) -> list[TakenOrder | Refused]:
        """Returns what is new, a bounded number of it. Blocking."""
        try:
            directory = os.open(self.folder, DIRECTORY_FLAGS)
        except FileNotFoundError:
            return []
        except OSError as error:
            name = self.folder.name
            if name in self._known:
                return []
            self._remember(name)
            return [Refused(name, f"it is no folder: {error.strerror}")]
        try:
            return list(itertools.chain.from_iterable(self._of(directory, name) for name in self._names(directory)))
        finally:
            os.close(directory)

    @property
    def is_looked_at(self) -> bool:
        """Whether somebody looks at the state of the run now. Blocking."""
        with suppress(OSError):
            return time.time() - (self.folder / LOOK).lstat().st_mtime < LOOKED_AT_SEC
        return False

    def _names(self, directory: int) -> list[str]:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in itertools.islice(entries, MOST_LISTED)]
        return sorted(name for name in names if name[0] != "." and name not in self._known)[:MOST_AT_ONCE]

    def _of(self, directory: int, name: str) -> Iterator[TakenOrder | Refused]:
        try:
            data, uid = _read(directory, name)
            yield TakenOrder(parse(data), uid)
        except FileNotFoundError:  # somebody has thought better of it
            return
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            yield Refused(name, said or type(error).__name__)
        if self._is_shared or not _removed(directory, name):
            self._remember(name)

    def _remember(self, name: str) -> None:
        self._known[name] = None
        while len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]


def forget_orders(folder: Path) -> None:
    """Removes what lies in the inbox of a run or a sweep that begins: it is for an earlier session. Blocking."""
    inbox = Inbox(folder)
    for _ in range(MOST_LISTED // MOST_AT_ONCE):
        if not inbox.take():
            return


def _read(directory: int, name: str) -> tuple[bytes, int]:
    """Reads a small regular file.

    Raises:
        OSError: It cannot be read; a link is not followed.
        ValueError: It is something else, or too large.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        raise ValueError("expected a regular file")
    descriptor = os.open(name, flags, dir_fd=directory)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("expected a regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES:,} bytes")
    return data, found.st_uid


def _removed(directory: int, name: str) -> bool:
    """Removes a file, or a folder that is empty; returns whether it is gone."""
    for remove in (os.unlink, os.rmdir):
        with suppress(OSError):
            remove(name, dir_fd=directory)
            return True
    return False
