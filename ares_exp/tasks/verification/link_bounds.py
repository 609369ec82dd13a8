"""`LinkBounds`: allowed targets of a task's symbolic links, and reads that follow no other link."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ares_exp.errors import TaskError
from ares_exp.records.run_dir import DIRECTORY_FLAGS, open_beneath

_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO at this path must not block


@dataclass(frozen=True, slots=True)
class LinkBounds:
    """The folders that the links of a task may point to. Folders are compared with links in their paths resolved.

    Attributes:
        root: The task directory, without links in its path.
        shared: The folder of tasks that the user named, without links in its path; `None`: only the task directory.
    """

    root: Path
    shared: Path | None = None

    @classmethod
    def of(cls, task: Path, shared: Path | None = None) -> LinkBounds:
        """Resolves the links in the paths of the two folders, which are trusted because the user chose them."""
        return cls(task.resolve(), shared.resolve() if shared is not None else None)

    def real(self, path: Path) -> Path:
        """Resolves the links of `path`, whether or not the target exists.

        Raises:
            TaskError: The links leave the bounds.
        """
        return self._split(path)[1]

    def contain(self, path: Path) -> bool:
        """Returns whether the links of `path` stay inside the bounds."""
        try:
            self.real(path)
        except TaskError:
            return False
        return True

    def read_text(self, path: Path) -> str:
        """Reads a file. Links that change after they were resolved are not followed.

        Raises:
            TaskError: The links of `path` leave the bounds.
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
        """Returns the folder of the bounds that contains the target of `path`, and the real path."""
        real = Path(os.path.realpath(path))
        for folder in (self.root, self.shared):
            if folder is not None and real.is_relative_to(folder):
                return folder, real
        allowed = "the task" if self.shared is None else f"the task or inside {self.shared}"
        raise TaskError(
            f"{path}: expected a link to a place inside {allowed}, found a link to {real}. Copy the target into the "
            "task, and replace the link."
        )
