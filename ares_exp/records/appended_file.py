"""A file that is appended to many times, held open meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Self

from ares_exp.records.run_dir import append_text, open_to_append, sync_to_disk, write_whole

MOST_HELD = 128
"""How many of these files a process holds open; the others are opened for each text."""

_held_open: set[int] = set()


class AppendedFile:
    """Appends whole texts to a file, which is held open until `close`, unless too many are.

    Threads may share it. Nobody else in this process may write to the file meanwhile.
    """

    def __init__(self, path: Path | str, descriptor: int) -> None:
        """Takes over an open file.

        Args:
            path: The file. A text where one is opened for each episode: making a `Path` costs as much as a write.
            descriptor: Of the file, open for writing at its end.
        """
        self.path = path
        self._writing = threading.Lock()
        self._descriptor: int | None = None
        if len(_held_open) < MOST_HELD:
            _held_open.add(descriptor)
            self._descriptor = descriptor
        else:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path | str, *, flags: int = 0) -> Self:
        """Opens a file.

        Args:
            path: The file.
            flags: As of `append_text`.

        Raises:
            OSError: It cannot be opened.
        """
        return cls(path, open_to_append(path, flags))

    @property
    def is_in_place(self) -> bool:
        """Whether what is appended now can be found at its path: somebody may have removed the file."""
        try:
            there = os.stat(self.path)  # noqa: PTH116 - before each request
            return self._descriptor is None or os.path.samestat(os.fstat(self._descriptor), there)
        except OSError:
            return False

    def append(self, text: str) -> None:
        """Appends a text in one write, whole or not at all.

        Raises:
            OSError: The disk is full, or another failure; the file is unchanged.
        """
        with self._writing:
            if self._descriptor is None:
                append_text(self.path, text)
            else:
                write_whole(self._descriptor, text.encode(), self.path)

    def begin_sync(self) -> None:
        """Has what was appended go to the disk. Files that begin together need one entry in the disk's journal."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError, AttributeError):  # advice, which not every system takes
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Returns when what was appended survives a power cut. Not to be called while another thread closes it.

        Raises:
            OSError: It does not.
        """
        if self._descriptor is None:
            sync_to_disk(self.path)
        else:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Lets go of the file. Idempotent; what is appended later opens it again."""
        with self._writing:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _held_open.discard(descriptor)
            os.close(descriptor)

    def __del__(self) -> None:
        """Lets go of a file that nobody has closed: that of an episode which was dropped with its collector."""
        if self._descriptor is not None:
            self.close()
