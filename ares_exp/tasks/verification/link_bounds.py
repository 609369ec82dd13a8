"""`LinkBounds`, which prevents symbolic links in a task from pointing to other files of this machine."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ares_exp.errors import TaskError
from ares_exp.records.run_dir import DIRECTORY_FLAGS, open_beneath

_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking, because the path may be a FIFO


@dataclass(frozen=True, slots=True)
class LinkBounds:
    """The folders to which symbolic links in a task may point.

    A real path is a path in which all symbolic links are resolved. Only real paths are compared with the folders.

    Attributes:
        root: Real path of the task directory.
        shared: Real path of the folder of tasks that the user set. With `None`, links may only point into `root`.
    """

    root: Path
    shared: Path | None = None

    @classmethod
    def of(cls, task: Path, shared: Path | None = None) -> LinkBounds:
        """Creates the bounds of the task directory `task` and the folder of tasks `shared`.

        Symbolic links in these two paths themselves are followed, because the user chose the paths.
        """
        return cls(task.resolve(), shared.resolve() if shared is not None else None)

    def real(self, path: Path) -> Path:
        """Returns the real path of `path`, which need not exist. Raises `TaskError` if it is outside of the bounds."""
        return self._split(path)[1]

    def contain(self, path: Path) -> bool:
        """Returns whether the real path of `path` is inside one of the folders."""
        try:
            self.real(path)
        except TaskError:
            return False
        return True

    def read_text(self, path: Path) -> str:
        """Reads a text file inside the bounds.

        If another process replaces a part of the path with a link during the call, the link is not followed.

        Raises:
            TaskError: The real path of `path` is outside of the bounds.
            OSError: The file is missing, not a regular file, or cannot be read.
            UnicodeDecodeError: The file is not UTF-8 text.
        """
        folder, real = self._split(path)
        if real == folder:
            raise OSError(f"{path} is not a regular file")
        root = os.open(folder, DIRECTORY_FLAGS)
        try:
            above = real.parent.relative_to(folder).as_posix()
            with open_beneath(root, "" if above == "." else f"/{above}") as directory:
                descriptor = os.open(real.name, _FILE_FLAGS, dir_fd=directory)
        finally:
            os.close(root)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{path} is not a regular file")
        with os.fdopen(descriptor, encoding="utf-8") as file:
            return file.read()

    def _split(self, path: Path) -> tuple[Path, Path]:
        """Returns the allowed folder that contains the real path of `path`, and this real path."""
        real = Path(os.path.realpath(path))
        for folder in (self.root, self.shared):
            if folder is not None and real.is_relative_to(folder):
                return folder, real
        allowed = "the task" if self.shared is None else f"the task or inside {self.shared}"
        raise TaskError(
            f"{path}: expected a link to a place inside {allowed}, found a link to {real}. Copy the target into the "
            "task, and replace the link."
        )
