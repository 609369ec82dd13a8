"""The options of env=harbor that name tasks: `path`, `registry`, `dataset`, `git_url`, `git_commit`, `repo`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ares_exp.errors import ConfigError
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.tasks.task_sources.git_names import check_git_ref, check_git_url, check_inner_path
from ares_exp.tasks.task_sources.registry_file import REGISTRY, DatasetName
from ares_exp.tasks.task_sources.repository_reference import RepositoryReference
from ares_exp.tasks.task_sources.task_lists import (
    DEFAULT_FOLDER,
    HarborDataset,
    OneGitTask,
    RegistryList,
    RepositoryDataset,
    RepositoryFolder,
    TaskList,
)
from ares_exp.tasks.task_sources.task_reference import GitTask
from ares_exp.tasks.task_sources.task_source import ListedTasks, TaskFolder, TaskSource

T = TypeVar("T")
_URL = re.compile(r"(https?:)/+", re.IGNORECASE)


def task_source(
    *,
    path: Path | None = None,
    registry: Path | None = None,
    dataset: str | None = None,
    git_url: str | None = None,
    git_commit: str | None = None,
    repo: str | None = None,
    cache_dir: Path | None = None,
    git_timeout_sec: float = 600.0,
) -> TaskSource:
    """Returns the tasks that these options of env=harbor name together. Reads nothing.

    Args:
        path: A local folder of tasks, or one task; with `git_url` the task in the repository, with `repo` its folder of
            tasks, with `registry` a folder that links of its local tasks may lead to. None of the options: the bundled
            samples.
        registry: A `registry.json`; with `repo`, a path in the repository.
        dataset: Which of its data sets, `name[@version]`; with neither `registry` nor `repo`, of Harbor's own registry.
        git_url: The repository of one task.
        git_commit: The commit, branch or tag to take it from.
        repo: A repository of tasks; see `RepositoryReference`.
        cache_dir: Where fetched tasks are kept; `None`: `default_cache_dir()`.
        git_timeout_sec: What one git command may take.

    Raises:
        ConfigError: One of them is malformed, or they do not go together.
    """
    _refuse_url("path", path, "the repository of tasks is `env.repo=<url>`")
    _refuse_url("registry", registry, "download it first, or name its repository: `env.repo=org/name[@ref]`")
    given = {"path": path, "registry": registry, "dataset": dataset, "git_url": git_url, "repo": repo}
    used = [f"`env.{name}`" for name, value in given.items() if value is not None]
    if git_commit is not None and git_url is None:
        raise ConfigError("`env.git_commit` belongs to `env.git_url`. With `env.repo`, write `env.repo=<…>@<commit>`.")
    wanted = None if dataset is None else _read("dataset", dataset, DatasetName.parse)
    inside = None if path is None else str(path)
    links_within: Path | None = None
    tasks: TaskList
    if repo is not None:
        _refuse(used, git_url, "`env.repo` and `env.git_url` are two ways to name a repository: use one of them")
        tasks = _of_repository(_read("repo", repo, RepositoryReference.parse), inside, registry, wanted)
    elif git_url is not None:
        _refuse(used, registry or dataset, "`env.git_url` is one task, and no data set of a registry")
        url = _read("git_url", git_url, check_git_url)
        ref = None if git_commit is None else _read("git_commit", git_commit, check_git_ref)
        tasks = OneGitTask(GitTask(url, ref, _read("path", inside or ".", check_inner_path)))
    elif wanted is not None:
        if registry is None:
            _refuse(used, path, "`env.path` is a folder of tasks, and no data set of a registry")
            tasks = HarborDataset(wanted)
        else:
            tasks, links_within = RegistryList(registry, wanted), path
    elif registry is not None:
        raise ConfigError(f"`env.registry={registry}` has data sets: choose one with `env.dataset=name[@version]`.")
    else:
        return TaskFolder(path or SAMPLES)
    return ListedTasks(tasks, cache_dir=cache_dir, git_timeout_sec=git_timeout_sec, links_within=links_within)


def _of_repository(
    repository: RepositoryReference, inside: str | None, registry: Path | None, wanted: DatasetName | None
) -> TaskList:
    if wanted is not None:
        if inside is not None or repository.folder is not None:
            raise ConfigError("`env.dataset` says which tasks of `env.repo` are meant: name no folder of it as well.")
        file = _read("registry", str(registry or REGISTRY), check_inner_path)
        return RepositoryDataset(repository, wanted, file if file.endswith(".json") else f"{file}/{REGISTRY}")
    if registry is not None:
        raise ConfigError("`env.registry` of `env.repo` has data sets: choose one with `env.dataset=name[@version]`.")
    if inside is not None and repository.folder is not None:
        raise ConfigError(
            f"Expected one folder of `env.repo`, got {repository.folder!r} in it and {inside!r} in `env.path`."
        )
    folder = inside or repository.folder or DEFAULT_FOLDER
    return RepositoryFolder(repository, _read("path", folder, check_inner_path))


def _refuse_url(option: str, path: Path | None, remedy: str) -> None:
    if path is not None and (found := _URL.match(str(path))) is not None:
        url = f"{found[1]}//{str(path)[found.end() :]}"  # as a path it has lost a slash
        raise ConfigError(f"Expected `env.{option}` to be a path, got the URL {url}: {remedy}.")


def _refuse(used: Sequence[str], conflicting: object, complaint: str) -> None:
    if conflicting is not None:
        raise ConfigError(f"{complaint}. Got {', '.join(used)}.")


def _read(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"`env.{option}`: {error}.") from None
