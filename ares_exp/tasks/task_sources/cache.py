"""The cache of fetched tasks, and of the commits that they are from.

A task is in `<folder>/<key>/<base name of the task>`, a key for each repository, commit and path; the copy of a commit
in `<folder>/commits/<key>`, a key for each repository and commit.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ares_exp.containers.ownership import OwnedDirectory, delete, find_directories, name_prefix
from ares_exp.containers.user_cache import hold, user_cache_dir
from ares_exp.errors import PreflightError
from ares_exp.tasks.task_origin import TaskOrigin

_PURPOSE = "fetch"


def default_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/ares_exp/tasks`, or `~/.cache/ares_exp/tasks` without that variable."""
    return user_cache_dir() / "tasks"


class TaskCache:
    """Tasks and commits that were fetched once. Several processes may use it at the same time.

    What is in it is whole: it is made in a directory of the process that fetches it, and renamed. A task never changes
    then, as its key has all digits of the commit. Nothing is cleaned as long as a process lives that looked or fetched.
    """

    def __init__(self, folder: Path) -> None:
        """Names a cache.

        Args:
            folder: Its folder; made when something is kept.
        """
        self.folder = folder

    def repository(self, url: str, commit: str) -> Path:
        """Returns where the copy of a commit is, or would be."""
        return self.folder / "commits" / _key(url, commit)

    def keep_repository(self, url: str, commit: str, made: Path) -> None:
        """Takes the copy of a commit in; another process may have been faster.

        Raises:
            PreflightError: It cannot be taken in.
        """
        place = self.repository(url, commit)
        try:
            place.parent.mkdir(exist_ok=True)
            made.rename(place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise PreflightError(
                    f"Cannot write {place}: {error.strerror}. Set another `env.cache_dir=<folder>`."
                ) from error

    def find(self, origin: TaskOrigin, name: str) -> Path | None:
        """Returns the directory of a task, if it is there and not empty."""
        hold(self.folder)
        path = self.folder / _key(origin.git_url, origin.git_commit, origin.path) / name
        try:
            return path if any(path.iterdir()) else None
        except OSError:
            return None

    def keep(self, origin: TaskOrigin, made: Path) -> Path:
        """Takes a task in.

        Args:
            origin: What it is.
            made: The only entry of a directory in a `workspace`: the task, under its name.

        Returns:
            Where it is now; another process may have been faster.

        Raises:
            PreflightError: It cannot be taken in.
        """
        place = self.folder / _key(origin.git_url, origin.git_commit, origin.path)
        with suppress(OSError):  # what somebody has emptied
            (place / made.name).rmdir()
        try:
            made.parent.rename(place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or self.find(origin, made.name) is None:
                raise PreflightError(
                    f"Expected the cache to take {made.name} in at {place}: {error.strerror}. Remove what is there, or "
                    "set another `env.cache_dir=<folder>`."
                ) from error
        return place / made.name

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Makes a directory beside the tasks, and removes it afterwards; also those of killed processes.

        Raises:
            PreflightError: It cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            hold(self.folder)
            directory = OwnedDirectory(f"{name_prefix(_PURPOSE)}{os.getpid()}-", self.folder.resolve())
        except OSError as error:
            raise PreflightError(
                f"Expected to write fetched tasks to {self.folder}: {error.strerror}. Set another "
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
