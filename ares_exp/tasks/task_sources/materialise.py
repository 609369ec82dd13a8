"""Copies a task out of a checked-out repository; its symbolic links become what they point to."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from ares_exp.errors import TaskError
from ares_exp.tasks.task_sources.lfs_pointers import is_pointer

MAX_ENTRIES = 100_000
MAX_BYTES = 20 * 10**9


def materialise(task: Path, target: Path) -> None:
    """Copies a folder. Links have to be relative and to stay inside of it; copies of what they mean take their place.

    Args:
        task: The folder; nobody else writes there.
        target: The copy; must not be there.

    Raises:
        TaskError: A link is absolute, leads out, in circles or nowhere; an entry is no file, folder or link; a file is
            a pointer to one in Git LFS; or there is too much. The message begins with the entry's path in the task.
        OSError: It cannot be read or written.
    """
    _Copy(task.resolve()).folder(task.resolve(), target, ())


class _Copy:
    """One copy, which knows how much it has copied: links that lead to folders of links multiply."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._entries = 0
        self._bytes = 0

    def folder(self, source: Path, target: Path, around: tuple[Path, ...]) -> None:
        """Copies a real folder; `around` are those that it is in, by way of links, too."""
        target.mkdir()
        for entry in sorted(source.iterdir()):
            meant = self._meant(entry)
            status = meant.lstat()
            mode = status.st_mode
            self._count(status.st_size if stat.S_ISREG(mode) else 0)
            if stat.S_ISDIR(mode):
                if meant in (source, *around):
                    raise self._refusal(entry, "expected a link to something else than a folder that it is in")
                self.folder(meant, target / entry.name, (source, *around))
            elif stat.S_ISREG(mode):
                self._file(meant, target / entry.name)
            else:
                raise self._refusal(entry, "expected a file, a folder or a link, got something else")

    def _file(self, source: Path, target: Path) -> None:
        if is_pointer(source):
            raise self._refusal(source, "expected a file, got a pointer to one in Git LFS. Install `git-lfs`")
        shutil.copy(source, target)

    def _meant(self, entry: Path) -> Path:
        """The entry itself, or what it points to in the end."""
        if not entry.is_symlink():
            return entry
        link = entry.readlink()
        if link.is_absolute():
            raise self._refusal(entry, f"expected a relative link, got one to {str(link)!r:.200}")
        if not Path(os.path.normpath(entry.parent / link)).is_relative_to(self._root):
            raise self._refusal(entry, f"expected a link that stays inside the task, got one to {str(link)!r:.200}")
        try:
            meant = Path(os.path.realpath(entry, strict=True))
        except OSError as error:
            raise self._refusal(
                entry, f"expected a link to something, got one to {str(link)!r:.200}: {error.strerror}"
            ) from None
        if not meant.is_relative_to(self._root):
            raise self._refusal(entry, f"expected a link that stays inside the task, got one to {str(link)!r:.200}")
        return meant

    def _count(self, size: int) -> None:
        self._entries += 1
        self._bytes += size
        if self._entries > MAX_ENTRIES or self._bytes > MAX_BYTES:
            raise TaskError(f"expected at most {MAX_ENTRIES:,} files of {MAX_BYTES:,} bytes in all, got more")

    def _refusal(self, entry: Path, complaint: str) -> TaskError:
        return TaskError(f"{entry.relative_to(self._root).as_posix()}: {complaint}")
