"""Lists of tasks for env=harbor, from a `registry.json`, a repository of tasks, or one task in a git repository."""

from __future__ import annotations

import json
import logging
import posixpath
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from ares_exp.errors import ConfigError, GitError, PreflightError, TaskError, close_matches
from ares_exp.records.run_dir import read_record
from ares_exp.tasks.harbor_task import HarborTask, load_task
from ares_exp.tasks.task_contract import TaskOrigin
from ares_exp.tasks.task_set import SHOWN_PROBLEMS, Select, refusal, refuse_url
from ares_exp.tasks.task_sources.git_tasks import (
    FOLDER,
    Git,
    GitTask,
    Repositories,
    RepositoryReference,
    check_git_ref,
    check_git_url,
    check_inner_path,
    default_cache_dir,
)
from ares_exp.tasks.task_toml import TASK_TOML, explain

DEFAULT_FOLDER = "tasks"
HARBOR_REPOSITORY = "https://github.com/harbor-framework/harbor.git"
"""URL of the repository with Harbor's own registry. Harbor's code uses an older URL, which redirects to this URL."""

log = logging.getLogger(__name__)
T = TypeVar("T")


TaskReference = Path | GitTask
"""A task: its directory on this machine, or its location in a git repository."""
ListTasks = Callable[[Repositories], Sequence[TaskReference]]
"""A function that lists the locations of tasks, without reading the tasks. Blocking. May raise `UserError`."""


class ListedTasks:
    """A source of tasks from a list. It fetches and reads only the selected tasks, and rejects invalid ones."""

    path = None
    loads_offline = False

    def __init__(
        self, list_tasks: ListTasks, *, cache_dir: Path | None, git_timeout_sec: float, links_within: Path | None = None
    ) -> None:
        """Creates the source, without listing or fetching tasks; see `HarborEnvironments` for the options.

        Symbolic links in local tasks may also point into `links_within`. With `None`, they must stay in the task.
        """
        self._list = list_tasks
        self._links_within = links_within.expanduser() if links_within is not None else None
        self._cache_dir = cache_dir
        self._git = Git(timeout_sec=git_timeout_sec)
        self.stop = self._git.stop

    def load(self, select: Select, report: Callable[[str], None], *, reward_key: str | None) -> list[HarborTask]:
        """Lists the tasks, and fetches and reads the selected tasks. Blocking; see `TaskFolder.load`.

        Raises:
            UserError: A selected task is invalid, several selected tasks have the same name, or git fails.
        """
        folder = (self._cache_dir or default_cache_dir()).expanduser()
        repositories = Repositories(self._git, folder)
        try:
            chosen = select(self._list(repositories))
            counted = Counter(task.name for task in chosen)
            if twice := sorted(name for name, count in counted.items() if count > 1)[:SHOWN_PROBLEMS]:
                raise TaskError(
                    f"Expected tasks with unique names, but several tasks have the name {', '.join(twice)}. A name "
                    f"is the last part of a task's path. Exclude these tasks: env.exclude=[{','.join(twice)}]."
                )
            places, problems = repositories.fetch([task for task in chosen if isinstance(task, GitTask)], report)
        except OSError as error:
            raise PreflightError(
                f"Tasks cannot be fetched into {folder}: {error}. Set another `env.cache_dir=<folder>`."
            ) from error
        loaded: list[HarborTask] = []
        for task in (one for one in chosen if one.name not in problems):
            try:
                if isinstance(task, GitTask):
                    path, commit = places[task]
                    origin = TaskOrigin(task.url, commit, task.path)
                    loaded.append(replace(load_task(path, reward_key=reward_key), origin=origin))
                else:
                    if not task.is_dir():
                        raise TaskError(
                            f"{task}: this task directory does not exist. Paths in a registry are relative to the "
                            "current directory."
                        )
                    loaded.append(load_task(task, reward_key=reward_key, links_within=self._links_within))
            except (TaskError, OSError) as error:
                problems[task.name] = str(error)
        if problems:
            named = {name: f"{name}: {text}" for name, text in problems.items()}
            raise TaskError(refusal(named, len(chosen)))
        return loaded


def listed_tasks(
    *,
    path: Path | None,
    registry: Path | None,
    dataset: str | None,
    git_url: str | None,
    git_commit: str | None,
    repo: str | None,
    cache_dir: Path | None,
    git_timeout_sec: float,
) -> ListedTasks:
    """Creates the source that the options of env=harbor select, without reading any file.

    `HarborEnvironments` describes the options. Raises `ConfigError` if they are invalid or exclude each other.
    """
    refuse_url("registry", registry, "download the file first, or set its repository with `env.repo=org/name[@ref]`")
    given = {"path": path, "registry": registry, "dataset": dataset, "git_url": git_url, "repo": repo}
    used = ", ".join(f"`env.{name}`" for name, value in given.items() if value is not None)
    if git_commit is not None and git_url is None:
        raise ConfigError("`env.git_commit` needs `env.git_url`. With `env.repo`, use `env.repo=<…>@<commit>`.")
    wanted = None if dataset is None else _read("dataset", dataset, DatasetName.parse)
    inside = None if path is None else str(path)
    links_within: Path | None = None
    found: ListTasks
    if repo is not None:
        if git_url is not None:
            raise ConfigError(
                f"`env.repo` and `env.git_url` are two ways to name a repository. Use only one of them. Got {used}."
            )
        found = _of_repository(_read("repo", repo, RepositoryReference.parse), inside, registry, wanted)
    elif git_url is not None:
        if registry or dataset:
            raise ConfigError(f"`env.git_url` selects one task, so no registry or data set can be set. Got {used}.")
        url = _read("git_url", git_url, check_git_url)
        ref = None if git_commit is None else _read("git_commit", git_commit, check_git_ref)
        task = GitTask(url, ref, _read("path", inside or ".", check_inner_path))
        found = lambda repositories: [task]  # noqa: E731
    elif wanted is None:
        raise ConfigError(
            f"`env.registry={registry}` contains data sets. Choose one with `env.dataset=name[@version]`."
        )
    elif registry is not None:
        found, links_within = partial(_of_registry, registry.expanduser(), wanted), path
    elif path is not None:
        raise ConfigError(f"`env.path` is a folder of tasks, so no `env.dataset` can be set. Got {used}.")
    else:
        found = partial(_of_harbor, wanted)
    return ListedTasks(found, cache_dir=cache_dir, git_timeout_sec=git_timeout_sec, links_within=links_within)


def _of_repository(
    repository: RepositoryReference, inside: str | None, registry: Path | None, wanted: DatasetName | None
) -> ListTasks:
    if wanted is not None:
        if inside is not None or repository.folder is not None:
            raise ConfigError("`env.dataset` already selects the tasks of `env.repo`. Do not set a folder.")
        file = _read("registry", str(registry or REGISTRY), check_inner_path)
        return partial(
            data_set_of_repository, repository, wanted, file if file.endswith(".json") else f"{file}/{REGISTRY}"
        )
    if registry is not None:
        raise ConfigError("`env.registry` contains data sets. Choose one with `env.dataset=name[@version]`.")
    if inside is not None and repository.folder is not None:
        raise ConfigError(
            f"Expected one folder, got {repository.folder!r} in `env.repo` and {inside!r} in `env.path`. Remove one."
        )
    folder = inside or repository.folder or DEFAULT_FOLDER
    return partial(_of_folder, repository, _read("path", folder, check_inner_path))


def _read(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"`env.{option}`: {error}.") from None


def _of_registry(file: Path, dataset: DatasetName, repositories: Repositories) -> Sequence[TaskReference]:
    """Lists the tasks of a data set in a `registry.json` on this machine."""
    try:
        datasets = parse_registry(read_record(file), where=str(file))
    except OSError as error:
        found = {FileNotFoundError: "no file", IsADirectoryError: "a folder"}.get(type(error), error.strerror)
        raise ConfigError(f"{file}: expected a {REGISTRY}, but found {found}. Set `env.registry=<file>`.") from None
    return _references(choose(datasets, dataset, where=str(file)), str(file))


def data_set_of_repository(
    repository: RepositoryReference, dataset: DatasetName, file: str, repositories: Repositories
) -> Sequence[TaskReference]:
    """Lists the tasks of a data set in a repository's registry `file`. Tasks without a URL are in this repository."""
    url = repository.url
    commit = repositories.commit(url, repository.ref)
    where = f"{file} of {url} at {commit}"
    mode = repositories.tree(url, commit).get(file)
    if mode is None or not mode.startswith("100"):
        raise ConfigError(
            f"There is no file {where}. Leave `env.dataset` out to run the tasks in the folder "
            f"{DEFAULT_FOLDER}/, or set `env.registry=<path in the repository>`."
        )
    datasets = parse_registry(repositories.read(url, commit, file), where=where)
    return _references(choose(datasets, dataset, where=where), where, url=url, commit=commit)


def _of_harbor(dataset: DatasetName, repositories: Repositories) -> Sequence[TaskReference]:
    """Lists the tasks of a data set in Harbor's own registry, which is a file in Harbor's repository."""
    try:
        return data_set_of_repository(RepositoryReference(HARBOR_REPOSITORY), dataset, REGISTRY, repositories)
    except PreflightError as error:
        said = error.said if isinstance(error, GitError) else str(error)
        raise PreflightError(
            f"`env.dataset={dataset}` is set without `env.registry` and `env.repo`, so Harbor's own registry was "
            f"tried: {REGISTRY} of {HARBOR_REPOSITORY}.\n{said}\nIf it cannot be reached, set `env.registry=<a copy of "
            "the file>` or `env.repo=<a repository with a registry>`, or configure a mirror with `git config --global "
            f"url.<mirror>.insteadOf {HARBOR_REPOSITORY}`."
        ) from error


def _of_folder(repository: RepositoryReference, folder: str, repositories: Repositories) -> Sequence[TaskReference]:
    """Lists the tasks of a repository: all folders `<folder>/<child>` that contain a task.toml."""
    url = repository.url
    commit = repositories.commit(url, repository.ref)
    tree = repositories.tree(url, commit)
    tasks = [posixpath.dirname(path) for path in tree if posixpath.basename(path) == TASK_TOML]
    found = sorted(path for path in tasks if path and (posixpath.dirname(path) or ".") == folder)
    if REGISTRY in tree:
        log.info("%s has a %s; `env.dataset=<name>` runs one of its data sets", url, REGISTRY)
    if not found:
        folders = list(dict.fromkeys(posixpath.dirname(path) or "." for path in tasks if path))
        exists = folder == "." or tree.get(folder) == FOLDER
        raise TaskError(
            f"{url} at {commit}: expected folders with a {TASK_TOML} in {folder}/, but "
            f"{'found none' if exists else 'this folder does not exist'}.{close_matches(folder, folders)} Set "
            "`env.path=<folder in the repository>` (`.` for its root)."
        )
    return [GitTask(url, commit, path) for path in found]


def _references(
    dataset: Dataset, where: str, *, url: str | None = None, commit: str | None = None
) -> list[TaskReference]:
    """Returns the locations of the tasks of a data set.

    A task without a URL is in the repository `url`. If `url` is `None`, such a task is a folder on this machine.
    """
    log.info("%s: data set %s@%s, %d tasks", where, dataset.name, dataset.version, len(dataset.tasks))
    if not dataset.tasks:
        raise ConfigError(f"{where}: expected data set {dataset.name}@{dataset.version} to have tasks, found none.")
    return [_reference(task, where, url, commit) for task in dataset.tasks]


def _reference(task: RegisteredTask, where: str, url: str | None, commit: str | None) -> TaskReference:
    if task.git_url is None and url is None:
        return Path(task.path).expanduser().resolve()
    try:
        path = check_inner_path(task.path)
    except ValueError as error:
        raise ConfigError(f"{where}: task {task.name!r:.100}: {error}.") from None
    elsewhere = task.git_url is not None and task.git_url != url
    if url is not None and elsewhere and str(task.git_url).startswith("file:") and not url.startswith("file:"):
        raise ConfigError(
            f"{where}: task {task.name}: expected a remote URL, got {task.git_url}. A remote list must not "
            "refer to repositories on this machine."
        )
    return GitTask(task.git_url or str(url), task.git_commit_id or (None if elsewhere else commit), path)


REGISTRY = "registry.json"
SHOWN_DATASETS = 30


@dataclass(frozen=True, slots=True)
class DatasetName:
    """A parsed `env.dataset`: the name and version of a data set. If the version is `None`, `newest` selects one."""

    name: str
    version: str | None = None

    def __str__(self) -> str:
        """Returns `name` or `name@version`."""
        return self.name if self.version is None else f"{self.name}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> DatasetName:
        """Parses `name[@version]`. Raises `ValueError` for invalid names, and for Harbor's packages (`org/name`)."""
        name, at, version = text.partition("@")
        if "/" in name:
            raise ValueError(
                f"{text!r} is a package of Harbor's hosted service, which is not supported. A data set of "
                "Harbor's registry has no slash (`env.dataset=terminal-bench@2.0`). For a package, download it as "
                "a folder of tasks (`env.path=<folder>`), or set its repository (`env.repo=org/name`)"
            )
        if not name or (at and not version):
            raise ValueError(f"expected name or name@version, got {text!r}")
        return cls(name, version or None)


class RegisteredTask(BaseModel, frozen=True):
    """An entry of `tasks` in a data set. A task without `git_url` is local or in the repository of the registry."""

    name: str
    path: str
    git_url: Annotated[str, AfterValidator(check_git_url)] | None = None
    git_commit_id: Annotated[str, AfterValidator(check_git_ref)] | None = None


class RegisteredMetric(BaseModel, frozen=True):
    """An entry of `metrics` in a data set, by which Harbor aggregates results. It is validated, but not used."""

    type: Literal["sum", "min", "max", "mean", "uv-script"]
    kwargs: dict[str, Any] = Field(default_factory=dict)


class Dataset(BaseModel, frozen=True):
    """One version of a data set in a registry. Unknown keys are ignored."""

    name: str
    version: str
    description: str
    tasks: tuple[RegisteredTask, ...]
    metrics: tuple[RegisteredMetric, ...] = ()


_REGISTRY = TypeAdapter(list[Dataset])


def parse_registry(data: bytes, *, where: str) -> list[Dataset]:
    """Parses the content of the registry file `where`. Raises a `ConfigError` that names every error in the file."""
    try:
        rows = json.loads(data)
        return _REGISTRY.validate_python(rows)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, rows, root='the file')}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: invalid JSON: {error}.") from None


def choose(datasets: Sequence[Dataset], wanted: DatasetName, *, where: str) -> Dataset:
    """Returns the data set with this name and version. Raises `ConfigError` if it does not exist."""
    versions = [dataset for dataset in datasets if dataset.name == wanted.name]
    if not versions:
        names = list(dict.fromkeys(dataset.name for dataset in datasets))
        raise ConfigError(
            f"{where} has no data set {wanted.name!r}.{close_matches(wanted.name, names)} "
            f"Available data sets: {_listed(names)}."
        )
    known = [dataset.version for dataset in versions]
    version = wanted.version or newest(known)
    if version not in known:
        raise ConfigError(
            f"{where} has no version {version!r} of {wanted.name}.{close_matches(version, known)} "
            f"Available versions: {_listed(known)}."
        )
    return versions[known.index(version)]


def newest(versions: Sequence[str]) -> str:
    """Returns the default version: `head`; without `head`, the highest number; without numbers, the last by name."""
    if "head" in versions:
        return "head"
    numbered = []
    for version in versions:
        try:
            numbered.append((Version(version), version))
        except InvalidVersion:
            continue
    return max(numbered, key=lambda pair: pair[0])[1] if numbered else max(versions)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"{name!r:.100}" for name in names[:SHOWN_DATASETS])
    more = f", and {len(names) - SHOWN_DATASETS} more" if len(names) > SHOWN_DATASETS else ""
    return f"{shown}{more}" if names else "none"
