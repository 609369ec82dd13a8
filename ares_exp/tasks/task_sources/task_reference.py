"""References to tasks that have not been read, or even fetched, yet."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path

from ares_exp.tasks.task_origin import TaskOrigin
from ares_exp.tasks.task_sources.git_names import repository_name


@dataclass(frozen=True, slots=True)
class LocalTask:
    """A task in a directory of this machine.

    Attributes:
        path: The directory, absolute.
    """

    path: Path

    @property
    def name(self) -> str:
        """The base name of the directory."""
        return self.path.name


@dataclass(frozen=True, slots=True)
class GitTask:
    """A task in a git repository.

    Attributes:
        url: The repository.
        ref: A commit, a branch or a tag; `None`: the newest commit of the default branch.
        path: Its folder in the repository; `.` for the repository itself.
    """

    url: str
    ref: str | None
    path: str

    @property
    def name(self) -> str:
        """The base name of the folder; of a repository that is one task, the repository's."""
        return repository_name(self.url) if self.path == "." else posixpath.basename(self.path)

    def at(self, commit: str) -> TaskOrigin:
        """Returns the origin of the task at a commit."""
        return TaskOrigin(self.url, commit, self.path)


TaskReference = LocalTask | GitTask
