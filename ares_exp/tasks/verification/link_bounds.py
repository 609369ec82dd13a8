"""`LinkBounds`, which restricts the targets of a task's symbolic links, and reads files within these bounds."""

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
    """The folders to which symbolic links in a task may point. Paths are compared after all links are resolved.

    Attributes:
        root: Real path of the task directory.
        shared: Real path of the folder of tasks that the user set; `None` only allows the task directory.
    """

    root: Path
    shared: Path | None = None

    @classmethod
    def of(cls, task: Path, shared: Path | None = None) -> LinkBounds:
        """Creates bounds from two paths. Links in these paths are trusted, because the user chose the paths."""
        return cls(task.resolve(), shared.resolve() if shared is not None else None)

    def real(self, path: Path) -> Path:
        """Returns the real path of `path`, even if it does not exist.

        Raises:
            TaskError: The real path is outside of the bounds.
        """
        return self._split(path)[1]

    def contain(self, path: Path) -> bool:
        """Returns whether the real path of `path` is inside the bounds."""
        try:
            self.real(path)
        except TaskError:
            return False
        return True

    def read_text(self, path: Path) -> str:
        """Reads a file. A link that another process creates during the call is not followed.

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
