"""The cache of fetched tasks and of their commits.

A task is in `<folder>/<key>/<name of the task>`, with a key for each repository, commit and path. A commit is in
`<folder>/commits/<key>`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ares_exp.containers.ownership import OwnedDirectory, delete, find_directories, name_prefix
from ares_exp.containers.user_cache import hold, user_cache_dir
from ares_exp.errors import PreflightError
from ares_exp.tasks.task_contract import TaskOrigin

_PURPOSE = "fetch"


def default_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/ares_exp/tasks`; if the variable is not set, `~/.cache/ares_exp/tasks`."""
    return user_cache_dir() / "tasks"


class TaskCache:
    """A cache of fetched tasks and commits. Several processes may use it at the same time.

    Directories in the cache are always complete, because they are made in a `workspace` and then renamed. They never
    change, because their keys depend on the full hash of the commit. The cache is not cleaned while a process that has
    used it is running.
    """

    def __init__(self, folder: Path) -> None:
        """Sets the folder of the cache, without creating it.

        Args:
            folder: Folder of the cache, which is created on first use.
        """
        self.folder = folder

    def commit(self, url: str, commit: str) -> Path:
        """Returns the directory for a commit, which may not exist yet."""
        return self.folder / "commits" / _key(url, commit)

    def task(self, origin: TaskOrigin, name: str) -> Path:
        """Returns the directory for a task, which may not exist yet."""
        return self.folder / _key(origin.git_url, origin.git_commit, origin.path) / name

    def has(self, place: Path) -> bool:
        """Returns whether a directory of the cache exists and is not empty."""
        hold(self.folder)
        return place.is_dir() and any(place.iterdir())

    def keep(self, made: Path, place: Path) -> None:
        """Moves a directory of a `workspace` to its path in the cache, unless another process has already done so.

        Raises:
            PreflightError: The directory cannot be moved.
        """
        try:
            place.parent.mkdir(exist_ok=True)
            made.rename(place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise PreflightError(
                    f"Cannot write {place}: {error.strerror}. Set another `env.cache_dir=<folder>`."
                ) from error

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Makes a temporary directory in the cache, and removes it after the block.

        Also removes temporary directories of killed processes.

        Raises:
            PreflightError: The directory cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            hold(self.folder)
            directory = OwnedDirectory(f"{name_prefix(_PURPOSE)}{os.getpid()}-", self.folder.resolve())
        except OSError as error:
            raise PreflightError(
                f"Cannot write fetched tasks to {self.folder}: {error.strerror}. Choose another directory with "
                "`env.cache_dir=<folder>`."
            ) from error
        try:
            for leftover in find_directories(_PURPOSE, "directory", delete, [self.folder]):
                if leftover.is_stale:
                    leftover.remove()
            yield directory.path
        finally:
            directory.remove()


def _key(*identity: str) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
