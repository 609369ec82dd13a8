"""Fetches tasks out of git repositories into the cache."""

from __future__ import annotations

import logging
import posixpath
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ares_exp.config import close_matches
from ares_exp.errors import TaskError
from ares_exp.tasks.task_origin import TaskOrigin
from ares_exp.tasks.task_sources.cache import TaskCache
from ares_exp.tasks.task_sources.git_checkout import FOLDER, SUBMODULE, SYMLINK, GitCheckout
from ares_exp.tasks.task_sources.git_command import Git
from ares_exp.tasks.task_sources.git_names import is_commit
from ares_exp.tasks.task_sources.materialise import materialise
from ares_exp.tasks.task_sources.repository import Repository
from ares_exp.tasks.task_sources.repository_notes import RepositoryNotes
from ares_exp.tasks.task_sources.task_reference import GitTask
from ares_exp.tasks.task_toml import TASK_TOML

log = logging.getLogger(__name__)


class Checkouts:
    """The repositories that one reading of a task set needs, each copied once, and only if it is asked for."""

    def __init__(self, git: Git, cache: TaskCache, report: Callable[[str], None], stack: ExitStack) -> None:
        """Copies nothing yet; see `checkouts`."""
        self.cache = cache
        self._git = git
        self._report = report
        self._stack = stack
        self._repositories: dict[str, Repository] = {}
        self._workspace: Path | None = None
        self._staged = 0

    def of(self, url: str) -> Repository:
        """A repository, of which nothing is copied yet."""
        if url not in self._repositories:
            folder = f"copy-{len(self._repositories)}"
            notes = RepositoryNotes(self.cache.folder, url)
            make_copy = partial(self._copy, url, folder)
            self._repositories[url] = Repository(url, self._git, notes, make_copy, self._report)
        return self._repositories[url]

    def _copy(self, url: str, folder: str) -> GitCheckout:
        log.info("Fetching %s", url)
        return GitCheckout(self._git, self.workspace / folder, url)

    @property
    def workspace(self) -> Path:
        """A directory for all this."""
        if self._workspace is None:
            self._workspace = self._stack.enter_context(self.cache.workspace())
        return self._workspace

    def stage(self) -> Path:
        """A fresh directory in the workspace."""
        self._staged += 1
        stage = self.workspace / f"task-{self._staged}"
        stage.mkdir()
        return stage


@contextmanager
def checkouts(git: Git, cache: TaskCache, report: Callable[[str], None]) -> Iterator[Checkouts]:
    """`Checkouts` that leave nothing behind but what the cache took in."""
    with ExitStack() as stack:
        yield Checkouts(git, cache, report, stack)


@dataclass
class Fetched:
    """What came of fetching.

    Attributes:
        places: The directory of each task, and the commit that it is from.
        problems: What is wrong with the others, by their names.
    """

    places: dict[GitTask, tuple[Path, TaskOrigin]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def fetch(tasks: Sequence[GitTask], repositories: Checkouts, report: Callable[[str], None]) -> Fetched:
    """Puts tasks into the cache, but for those of given commits that it has. Blocking.

    Args:
        tasks: Which.
        repositories: Where they are taken from.
        report: Is told of what may be missing in them.

    Raises:
        PreflightError: A repository or a commit cannot be fetched, or nothing can be written.
    """
    found = Fetched()
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
            _fetch(missing, repository, commit, repositories, found, report)
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
    repository: Repository,
    commit: str,
    repositories: Checkouts,
    found: Fetched,
    report: Callable[[str], None],
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
            report(f"{task.name}: {path} is a submodule, whose files are not fetched")
    if not wanted:
        return
    work_tree = repository.check_out(commit, [task.path for task in wanted])
    for task in wanted:
        made = repositories.stage() / task.name
        try:
            materialise(work_tree / task.path, made)
        except (TaskError, OSError) as error:
            found.problems[task.name] = f"{task.url} at {commit}: {task.path}: {error}"
        else:
            origin = task.at(commit)
            found.places[task] = repositories.cache.keep(origin, made), origin
    shutil.rmtree(work_tree)


def _complaint(path: str, tree: Mapping[str, str]) -> str | None:
    """Why there is no task at a path of a commit."""
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
