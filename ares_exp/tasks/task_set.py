"""Task sets, which are folders of Harbor tasks or single tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ares_exp.errors import ConfigError, TaskError
from ares_exp.tasks.harbor_task import HarborTask, load_task
from ares_exp.tasks.selection import T
from ares_exp.tasks.task_toml import TASK_TOML
from ares_exp.tasks.task_warnings import TaskWarnings

SAMPLES = Path(__file__).parent / "samples"
"""The bundled sample tasks."""

_URL = re.compile(r"(https?:)/+", re.IGNORECASE)


class Select(Protocol):
    """A function that selects tasks of a set by their names."""

    def __call__(self, tasks: Sequence[T], /) -> list[T]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class SkippedTask:
    """A directory in a task set that is not a valid task, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TaskSet:
    """The tasks at a path, sorted by directory name, and the skipped directories."""

    path: Path
    tasks: tuple[HarborTask, ...]
    skipped: tuple[SkippedTask, ...] = ()


def scan_tasks(folder: str | Path, *, reward_key: str | None = None) -> tuple[list[HarborTask], list[SkippedTask]]:
    """Loads the tasks in the direct subdirectories of `folder`, sorted by name. Their links may point into `folder`.

    Returns:
        The tasks, and the directories without a valid task. Plain files, and hidden directories without a task.toml,
        are ignored.

    Raises:
        OSError: `folder` cannot be read.
    """
    within = Path(folder)
    tasks: dict[str, HarborTask] = {}
    skipped: list[SkippedTask] = []
    for child in sorted(within.iterdir(), key=lambda path: path.name):
        if not child.is_dir() or (child.name.startswith(".") and not (child / TASK_TOML).exists()):
            continue
        try:
            task = _load_child(child, reward_key, within=within, known=tasks)
        except (TaskError, OSError) as error:
            skipped.append(SkippedTask(child.name, str(error)))
        else:
            tasks[task.name] = task
    return list(tasks.values()), skipped


def _load_child(child: Path, reward_key: str | None, *, within: Path, known: dict[str, HarborTask]) -> HarborTask:
    """Loads one task of a set. The task must have a container definition and a unique name."""
    task = load_task(child, reward_key=reward_key, links_within=within)
    if not task.config.environment.docker_image and not (task.path / "environment").is_dir():
        raise TaskError(f"{task.path}: expected environment/ or [environment].docker_image, found neither.")
    if task.name in known:
        raise TaskError(
            f"{child}: the name {task.name!r} is already used by {known[task.name].path}. Rename the directory."
        )
    return task


def load_task_set(path: str | Path, *, reward_key: str | None = None) -> TaskSet:
    """Loads `path`: one task if it contains a task.toml, otherwise a folder of tasks.

    Args:
        path: A directory, in which `~` is expanded.
        reward_key: Key of the reward in `reward.json`, if it is neither `reward` nor the only key.

    Raises:
        TaskError: The directory does not exist, the task is invalid, or the folder has no valid task.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise TaskError(
            f"{root}: expected a task or a folder of tasks, found no such directory. Set env.path=<directory>."
        )
    if (root / TASK_TOML).exists():
        return TaskSet(root.resolve(), (load_task(root, reward_key=reward_key),))
    tasks, skipped = scan_tasks(root, reward_key=reward_key)
    if not tasks:
        reasons = "; ".join(f"{skip.name}: {skip.reason}" for skip in skipped[:5]) or "it has no sub-directories"
        raise TaskError(f"{root}: expected directories with a task.toml, found no valid task ({reasons}).")
    return TaskSet(root.resolve(), tuple(tasks), tuple(skipped))


class TaskFolder:
    """A local folder of tasks, or one task, as a source of tasks.

    Attributes:
        path: The folder that contains all tasks.
        loads_offline: Whether `load` reads only local files.
    """

    loads_offline = True

    def __init__(self, path: Path) -> None:
        """Sets the path of the folder or the task. Raises `ConfigError` if the path is a URL."""
        refuse_url("path", path, "the repository of tasks is `env.repo=<url>`")
        self.path = path

    def load(self, select: Select, report: Callable[[str], None], *, reward_key: str | None) -> list[HarborTask]:
        """Reads all tasks, and returns the selected tasks. Blocking.

        Args:
            select: Function that selects tasks.
            report: Callback for warnings that do not stop the run, such as directories without a valid task.
            reward_key: See `load_task`.

        Raises:
            UserError: The folder has no valid task, or no task is selected.
        """
        found = load_task_set(self.path, reward_key=reward_key)
        skipped = TaskWarnings()
        for one in found.skipped:
            skipped.add(one.name, [f"skipped, no valid task: {one.reason}"])
        skipped.tell(report, "directories")
        return select(found.tasks)

    def stop(self) -> None:
        """Does nothing. Other sources stop a `load` in another thread, but this `load` is fast."""


def refuse_url(option: str, path: Path | None, remedy: str) -> None:
    """Raises `ConfigError` if the path of `env.<option>` is a URL. `remedy` is the suggested fix."""
    if path is not None and (found := _URL.match(str(path))) is not None:
        url = f"{found[1]}//{str(path)[found.end() :]}"  # as a path, it has lost a slash
        raise ConfigError(f"Expected `env.{option}` to be a path, got the URL {url}: {remedy}.")
