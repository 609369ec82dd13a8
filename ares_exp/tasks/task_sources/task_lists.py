"""Lists of the tasks of a set: a registry, the address of one git task, or a repository of tasks."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ares_exp.errors import ConfigError, GitError, PreflightError, TaskError, close_matches
from ares_exp.tasks.task_sources.git_names import check_inner_path
from ares_exp.tasks.task_sources.git_repository import FOLDER
from ares_exp.tasks.task_sources.git_tasks import Repositories
from ares_exp.tasks.task_sources.registry_file import (
    REGISTRY,
    Dataset,
    DatasetName,
    RegisteredTask,
    choose,
    parse_registry,
)
from ares_exp.tasks.task_sources.registry_file import read_registry as read_registry_file
from ares_exp.tasks.task_sources.repository_reference import RepositoryReference
from ares_exp.tasks.task_sources.task_reference import GitTask, LocalTask, TaskReference
from ares_exp.tasks.task_toml import TASK_TOML

DEFAULT_FOLDER = "tasks"
HARBOR_REPOSITORY = "https://github.com/harbor-framework/harbor.git"
"""Has Harbor's own registry in its root; Harbor's code names it by an older address, which leads here."""

log = logging.getLogger(__name__)


class TaskList(Protocol):
    """Lists tasks without reading them."""

    def references(self, repositories: Repositories) -> Sequence[TaskReference]:
        """Returns the tasks, in order. Blocking.

        Raises:
            UserError: There is no list, or a broken one, or it has none.
        """
        ...


@dataclass(frozen=True)
class RegistryList:
    """A data set of a `registry.json` on this machine. Local paths in it are relative to the current directory."""

    file: Path
    dataset: DatasetName

    def references(self, repositories: Repositories) -> Sequence[TaskReference]:
        """See `TaskList`."""
        file = self.file.expanduser()
        return _references(choose(read_registry_file(file), self.dataset, where=str(file)), str(file))


@dataclass(frozen=True)
class OneGitTask:
    """A folder of a repository that is a task."""

    task: GitTask

    def references(self, repositories: Repositories) -> Sequence[TaskReference]:
        """See `TaskList`."""
        return [self.task]


@dataclass(frozen=True)
class RepositoryDataset:
    """A data set of the `registry.json` of a repository, whose tasks are in that repository unless they say where."""

    repository: RepositoryReference
    dataset: DatasetName
    file: str = REGISTRY

    def references(self, repositories: Repositories) -> Sequence[TaskReference]:
        """See `TaskList`."""
        repository = repositories.of(self.repository.url)
        commit = repository.commit(self.repository.ref)
        where = f"{self.file} of {repository.url} at {commit}"
        mode = repository.tree(commit).get(self.file)
        if mode is None or not mode.startswith("100"):
            raise ConfigError(
                f"Expected a file {where}, found none. Leave `env.dataset` out to play the tasks in its folder "
                f"{DEFAULT_FOLDER}/, or say with `env.registry=<path in the repository>` where the file is."
            )
        datasets = parse_registry(repository.read(commit, self.file), where=where)
        return _references(choose(datasets, self.dataset, where=where), where, url=repository.url, commit=commit)


@dataclass(frozen=True)
class HarborDataset:
    """A data set of Harbor's own registry, which lies in Harbor's repository."""

    dataset: DatasetName

    def references(self, repositories: Repositories) -> Sequence[TaskReference]:
        """See `TaskList`."""
        try:
            return RepositoryDataset(RepositoryReference(HARBOR_REPOSITORY), self.dataset).references(repositories)
        except PreflightError as error:
            said = error.said if isinstance(error, GitError) else str(error)
            raise PreflightError(
                f"`env.dataset={self.dataset}` names neither `env.registry` nor `env.repo`, so Harbor's own registry "
                f"was tried: {REGISTRY} of {HARBOR_REPOSITORY}.\n{said}\nWhere that is out of reach: "
                f"`env.registry=<a copy of the file>`, `env.repo=<a repository that has one>`, or a mirror, by `git "
                f"config --global url.<mirror>.insteadOf {HARBOR_REPOSITORY}`."
            ) from error


@dataclass(frozen=True)
class RepositoryFolder:
    """Every `<folder>/<child>/task.toml` of a repository."""

    repository: RepositoryReference
    folder: str = DEFAULT_FOLDER

    def references(self, repositories: Repositories) -> Sequence[TaskReference]:
        """See `TaskList`."""
        repository = repositories.of(self.repository.url)
        commit = repository.commit(self.repository.ref)
        tree = repository.tree(commit)
        tasks = [posixpath.dirname(path) for path in tree if posixpath.basename(path) == TASK_TOML]
        found = sorted(path for path in tasks if path and (posixpath.dirname(path) or ".") == self.folder)
        if REGISTRY in tree:
            log.info("%s has a %s; `env.dataset=<name>` plays one of its data sets", repository.url, REGISTRY)
        if not found:
            folders = list(dict.fromkeys(posixpath.dirname(path) or "." for path in tasks if path))
            there = self.folder == "." or tree.get(self.folder) == FOLDER
            raise TaskError(
                f"{repository.url} at {commit}: expected folders with a {TASK_TOML} in {self.folder}/, "
                f"{'found none' if there else 'which there is not'}.{close_matches(self.folder, folders)} Say with "
                "`env.path=<folder in the repository>` where they are (`.` for its root)."
            )
        return [GitTask(repository.url, commit, path) for path in found]


def _references(
    dataset: Dataset, where: str, *, url: str | None = None, commit: str | None = None
) -> list[TaskReference]:
    """The tasks of a data set; those without an address are in the repository `url`, if that is given."""
    log.info("%s: data set %s@%s, %d tasks", where, dataset.name, dataset.version, len(dataset.tasks))
    if not dataset.tasks:
        raise ConfigError(f"{where}: expected data set {dataset.name}@{dataset.version} to have tasks, it has none.")
    return [_reference(task, where, url, commit) for task in dataset.tasks]


def _reference(task: RegisteredTask, where: str, url: str | None, commit: str | None) -> TaskReference:
    if task.git_url is None and url is None:
        return LocalTask(Path(task.path).expanduser().resolve())
    try:
        path = check_inner_path(task.path)
    except ValueError as error:
        raise ConfigError(f"{where}: task {task.name!r:.100}: {error}.") from None
    elsewhere = task.git_url is not None and task.git_url != url
    if url is not None and elsewhere and str(task.git_url).startswith("file:") and not url.startswith("file:"):
        raise ConfigError(
            f"{where}: task {task.name!r:.100}: expected an address, got {task.git_url!r:.100}: a list from elsewhere "
            "does not name repositories of this machine."
        )
    return GitTask(task.git_url or str(url), task.git_commit_id or (None if elsewhere else commit), path)
