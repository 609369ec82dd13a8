"""The origin of a task's files in a git repository."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskOrigin:
    """A folder of a git repository at one commit.

    Attributes:
        git_url: The repository.
        git_commit: All hexadecimal digits of the commit, whatever it was asked for by.
        path: The task's folder in the repository, relative; `.` for the repository itself.
    """

    git_url: str
    git_commit: str
    path: str
