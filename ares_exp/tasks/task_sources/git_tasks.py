"""Fetches tasks out of git repositories into the cache."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ares_exp.errors import TaskError, close_matches
from ares_exp.tasks.task_origin import TaskOrigin
from ares_exp.tasks.task_sources.cache import TaskCache
from ares_exp.tasks.task_sources.git_command import Git
from ares_exp.tasks.task_sources.git_names import is_commit
from ares_exp.tasks.task_sources.git_repository import FOLDER, SUBMODULE, SYMLINK, GitRepository
from ares_exp.tasks.task_sources.lfs_pointers import refuse_pointers
from ares_exp.tasks.task_sources.materialise import materialise
from ares_exp.tasks.task_sources.task_reference import GitTask
from ares_exp.tasks.task_toml import TASK_TOML
from ares_exp.tasks.task_warnings import TaskWarnings

log = logging.getLogger(__name__)


class Repositories:
    """The repositories that one reading of a task set needs."""

    def __init__(self, git: Git, cache: TaskCache) -> None:
        """Names no repository yet.

        Args:
            git: Runs the commands.
            cache: Keeps commits and tasks.
        """
        self.cache = cache
        self._git = git
        self._repositories: dict[str, GitRepository] = {}

    def of(self, url: str) -> GitRepository:
        """Returns a repository; nothing of it is copied yet."""
        return self._repositories.setdefault(url, GitRepository(self._git, self.cache, url))


@dataclass
class Fetched:
    """Fetched tasks.

    Attributes:
        places: The directory of each task, and its origin.
        problems: What is wrong with the others, by their names.
    """

    places: dict[GitTask, tuple[Path, TaskOrigin]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def fetch(tasks: Sequence[GitTask], repositories: Repositories, report: Callable[[str], None]) -> Fetched:
    """Puts tasks into the cache, but for those of given commits that it has. Blocking.

    Args:
        tasks: The tasks.
        repositories: Where they are taken from.
        report: Gets a line for the submodules, whose files are missing.

    Raises:
        PreflightError: A repository or a commit cannot be fetched, or nothing can be written.
    """
    found, submodules = Fetched(), TaskWarnings()
    groups: dict[tuple[str, str | None], list[GitTask]] = {}
    for task in tasks:
        groups.setdefault((task.url, task.ref), []).append(task)
    for (url, ref), group in groups.items():
        if ref is not None and is_commit(ref) and not _missing(group, ref, repositories.cache, found):
            continue
        repository = repositories.of(url)
        commit = repository.commit(ref)
        if missing := _missing(group, commit, repositories.cache, found):
            log.info("Fetching %d tasks of %s at %s", len(missing), url, commit)
            _fetch(missing, repository, commit, repositories, found, submodules)
    submodules.tell(report)
    return found


def _missing(group: Sequence[GitTask], commit: str, cache: TaskCache, found: Fetched) -> list[GitTask]:
    """Those that are not in the cache; the others are noted."""
    missing = []
    for task in group:
        origin = task.at(commit)
        if (place := cache.find(origin, task.name)) is None:
            missing.append(task)
        else:
            found.places[task] = place, origin
    return missing


def _fetch(
    tasks: Sequence[GitTask],
    repository: GitRepository,
    commit: str,
    repositories: Repositories,
    found: Fetched,
    submodules: TaskWarnings,
) -> None:
    tree = repository.tree(commit)
    wanted = []
    for task in tasks:
        if (complaint := _complaint(task.path, tree)) is None:
            wanted.append(task)
        else:
            found.problems[task.name] = f"{task.url} at {commit}: {complaint}"
    for path in (path for path, mode in tree.items() if mode == SUBMODULE):
        for task in (task for task in wanted if task.path == "." or path.startswith(f"{task.path}/")):
            submodules.add(task.name, [f"{path} is a submodule, whose files are not fetched"])
    if not wanted:
        return
    with repositories.cache.workspace() as workspace:
        files = repository.check_out(commit, [task.path for task in wanted], workspace / "checkout")
        for number, task in enumerate(wanted):
            made = workspace / str(number) / task.name
            made.parent.mkdir()
            try:
                materialise(files / task.path, made)
                refuse_pointers(made, "Install `git-lfs`.")
            except (TaskError, OSError) as error:
                found.problems[task.name] = f"{task.url} at {commit}: {task.path}: {error}"
            else:
                origin = task.at(commit)
                found.places[task] = repositories.cache.keep(origin, made), origin


def _complaint(path: str, tree: Mapping[str, str]) -> str | None:
    """Returns why there is no task at a path of a commit; `None` if there is one."""
    parts = [] if path == "." else path.split("/")
    for depth in range(1, len(parts) + 1):
        prefix = "/".join(parts[:depth])
        mode = tree.get(prefix)
        if mode == SYMLINK:
            return f"expected a path without symbolic links, but {prefix} is one"
        if mode is None:
            folders = [posixpath.dirname(one) for one in tree if posixpath.basename(one) == TASK_TOML]
            return f"there is no {path}.{close_matches(path, folders)}"
        if mode != FOLDER:
            return f"expected {prefix} to be a folder, got {'a submodule' if mode == SUBMODULE else 'a file'}"
    if posixpath.normpath(f"{path}/{TASK_TOML}") not in tree:
        return (
            f"expected a task, found no {TASK_TOML} in `{path}`. A folder of tasks: `env.repo=<repository> "
            f"env.path={path}`"
        )
    return None
