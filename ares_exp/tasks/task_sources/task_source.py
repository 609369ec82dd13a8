"""`TaskSource`: tasks that are read when a run starts, from a local folder or from where a list says they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from ares_exp.errors import PreflightError, TaskError
from ares_exp.tasks.harbor_task import HarborTask, load_task
from ares_exp.tasks.selection import Named
from ares_exp.tasks.task_origin import TaskOrigin
from ares_exp.tasks.task_set import load_task_set
from ares_exp.tasks.task_sources.cache import TaskCache, default_cache_dir
from ares_exp.tasks.task_sources.git_command import Git
from ares_exp.tasks.task_sources.git_tasks import Repositories, fetch
from ares_exp.tasks.task_sources.lfs_pointers import refuse_pointers
from ares_exp.tasks.task_sources.task_lists import TaskList
from ares_exp.tasks.task_sources.task_reference import GitTask, LocalTask, TaskReference
from ares_exp.tasks.task_warnings import TaskWarnings

SHOWN_PROBLEMS = 10

T = TypeVar("T", bound=Named)


class Select(Protocol):
    """Picks tasks of a set by their names."""

    def __call__(self, tasks: Sequence[T], /) -> list[T]: ...  # noqa: D102


class TaskSource(Protocol):
    """Tasks that are not read yet."""

    @property
    def path(self) -> Path | None:
        """The folder that they all lie in, if there is one."""
        ...

    @property
    def loads_offline(self) -> bool:
        """Whether `load` reads nothing but local files."""
        ...

    def load(self, select: Select, report: Callable[[str], None], *, reward_key: str | None) -> list[HarborTask]:
        """Reads those that are selected. Blocking.

        Args:
            select: Picks them.
            report: Gets warnings that do not stop the run.
            reward_key: See `load_task`.

        Raises:
            UserError: There are none, or some are wrong.
        """
        ...

    def stop(self) -> None:
        """Has a `load` in another thread end soon, in an error."""
        ...


class TaskFolder:
    """A local folder of tasks, or one task."""

    loads_offline = True

    def __init__(self, path: Path) -> None:
        """Names the folder.

        Args:
            path: The folder, or the task.
        """
        self.path = path

    def load(self, select: Select, report: Callable[[str], None], *, reward_key: str | None) -> list[HarborTask]:
        """See `TaskSource`; directories that are no valid task are reported by name."""
        found = load_task_set(self.path, reward_key=reward_key)
        problems = {skipped.name: skipped.reason for skipped in found.skipped}
        whole: list[HarborTask] = []
        for task in found.tasks:
            try:
                refuse_pointers(task.path)
                whole.append(task)
            except TaskError as error:
                problems[task.name] = str(error)
        if not whole:
            raise _refusal(problems, len(problems))
        skipped = TaskWarnings()
        for name, reason in sorted(problems.items()):
            skipped.add(name, [f"skipped, no valid task: {reason}"])
        skipped.tell(report, "directories")
        return select(whole)

    def stop(self) -> None:
        """See `TaskSource`: this takes no time."""


class ListedTasks:
    """Tasks of a list. Only selected ones are fetched and read, and all of them have to be valid."""

    path = None
    loads_offline = False

    def __init__(
        self, tasks: TaskList, *, cache_dir: Path | None, git_timeout_sec: float, links_within: Path | None = None
    ) -> None:
        """Names the list.

        Args:
            tasks: The list.
            cache_dir: Where fetched tasks are kept; `None`: `default_cache_dir()`.
            git_timeout_sec: Bound on one git command.
            links_within: A folder that links of local tasks may lead to; `None`: they stay inside their task.
        """
        self._tasks = tasks
        self._links_within = links_within.expanduser() if links_within is not None else None
        self._cache_dir = cache_dir
        self._git = Git(timeout_sec=git_timeout_sec)

    def load(self, select: Select, report: Callable[[str], None], *, reward_key: str | None) -> list[HarborTask]:
        """See `TaskSource`."""
        cache = TaskCache((self._cache_dir or default_cache_dir()).expanduser())
        try:
            repositories = Repositories(self._git, cache)
            chosen = select(self._tasks.references(repositories))
            _refuse_equal_names(chosen)
            fetched = fetch([task for task in chosen if isinstance(task, GitTask)], repositories, report)
        except OSError as error:
            raise PreflightError(
                f"Tasks cannot be fetched into {cache.folder}: {error}. Set another `env.cache_dir=<folder>`."
            ) from error
        loaded: list[HarborTask] = []
        problems = fetched.problems
        for reference in (one for one in chosen if one.name not in problems):
            try:
                path, origin = _place(reference, fetched.places)
                within = self._links_within if isinstance(reference, LocalTask) else None
                task = load_task(path, reward_key=reward_key, links_within=within)
                loaded.append(replace(task, origin=origin))
            except (TaskError, OSError) as error:
                problems[reference.name] = str(error)
        if problems:
            raise _refusal(problems, len(chosen))
        return loaded

    def stop(self) -> None:
        """See `TaskSource`: kills the git command that runs."""
        self._git.stop()


def _place(task: TaskReference, places: dict[GitTask, tuple[Path, TaskOrigin]]) -> tuple[Path, TaskOrigin | None]:
    if isinstance(task, LocalTask):
        if not task.path.is_dir():
            raise TaskError(
                f"{task.path}: expected a task, found no such directory. Paths of a registry are relative to the "
                "current directory."
            )
        refuse_pointers(task.path)
        return task.path, None
    return places[task]


def _refuse_equal_names(tasks: Sequence[TaskReference]) -> None:
    counted = Counter(task.name for task in tasks)
    if twice := sorted(name for name, count in counted.items() if count > 1)[:SHOWN_PROBLEMS]:
        raise TaskError(
            f"Expected tasks with names of their own, but several are called {', '.join(twice)}. A name is the last "
            f"part of a task's path. Leave them out: env.exclude=[{','.join(twice)}]."
        )


def _refusal(problems: dict[str, str], selected: int) -> TaskError:
    shown = [f"{name}: {text}" for name, text in list(problems.items())[:SHOWN_PROBLEMS]]
    if len(problems) > len(shown):
        shown.append(f"… and {len(problems) - len(shown)} more.")
    if len(problems) < selected:
        shown.append(f"To play the others: env.exclude=[{','.join(list(problems)[:SHOWN_PROBLEMS])}].")
    return TaskError("\n".join(shown))
