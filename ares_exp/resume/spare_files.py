"""Files that are not needed any more, kept to become others: ext4 takes long to find a place for a new file.

It does not give the place of a removed file to a new one for a minute or more, and looks at each of them again for
every file that is made: a run whose episodes are short makes and removes hundreds of files a second.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from pathlib import Path

from ares_exp.records.appended_file import AppendedFile

KEPT = 64
"""How many spare files there are at most."""

MAX_BYTES = 256 * 1024
"""Files above are removed: to empty one costs as much, and their room is wanted."""


class SpareFiles:
    """Removes files of a folder, of which some are used again. Threads may share it.

    A spare one is called `.….tmp`, as what a process leaves that is killed while it writes, and is swept up the same
    way.
    """

    def __init__(self, folder: Path) -> None:
        """Keeps the arguments; does no I/O."""
        self._folder = folder
        self._spare: list[str] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    def remove(self, path: Path) -> None:
        """Removes a file: nothing of this name is there any more. One that is gone already stays so."""
        spare = f"{self._folder}/.spare-{next(self._numbers)}.{os.getpid()}.tmp"
        with contextlib.suppress(FileNotFoundError), self._lock:
            if self._closed or len(self._spare) >= KEPT or path.stat().st_size > MAX_BYTES:
                path.unlink()
            else:
                os.rename(path, spare)  # noqa: PTH104
                self._spare.append(spare)

    def make(self, path: Path | str, text: str) -> AppendedFile | None:
        """Makes a file of a spare one; it appears whole. One that is there is replaced.

        Returns:
            The file, open; `None` where it could not be made: then nothing of this name was touched.
        """
        with self._lock:
            if not self._spare:
                return None
            spare = self._spare.pop()
        descriptor = None
        try:
            descriptor = os.open(spare, os.O_WRONLY | os.O_NOFOLLOW)
            _write_over(descriptor, text.encode())
            os.rename(spare, path)  # noqa: PTH104 - a Path for each episode costs more than the call
        except OSError:  # the disk is full, or somebody has cleared the folder
            with contextlib.suppress(OSError):
                os.unlink(spare)  # noqa: PTH108
            if descriptor is not None:
                os.close(descriptor)
            return None
        return AppendedFile(path, descriptor)

    def close(self) -> None:
        """Removes the spare files. Idempotent; what is removed later is gone at once."""
        with self._lock:
            self._closed = True
            for spare in self._spare:
                with contextlib.suppress(OSError):
                    os.unlink(spare)  # noqa: PTH108
            self._spare.clear()


def _write_over(descriptor: int, data: bytes) -> None:
    """Gives a file other content. Emptied first, its new content would go to the disk at once when it is closed."""
    if os.write(descriptor, data) != len(data):
        raise OSError("the disk is full")
    os.ftruncate(descriptor, len(data))
