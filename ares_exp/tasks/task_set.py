"""Task sets: folders of Harbor tasks, and single tasks. Also merges similar warnings about the tasks of a set."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ares_exp.errors import ConfigError, TaskError
from ares_exp.tasks.harbor_task import HarborTask, load_task
from ares_exp.tasks.selection import T
from ares_exp.tasks.task_toml import TASK_TOML

logger = logging.getLogger(__name__)

SAMPLES = Path(__file__).parent / "samples"
"""The bundled sample tasks."""

_URL = re.compile(r"(https?:)/+", re.IGNORECASE)


class Select(Protocol):
    """A function that selects tasks from a set by their names."""

    def __call__(self, tasks: Sequence[T], /) -> list[T]: ...  # noqa: D102


def load_task_set(path: str | Path, *, reward_key: str | None = None) -> tuple[list[HarborTask], dict[str, str]]:
    """Loads the task at `path` if it contains a task.toml, otherwise the tasks in the direct subdirectories of `path`.

    Args:
        path: A directory. `~` is expanded. Symbolic links in a task may point to files anywhere in this directory.
        reward_key: Key of the reward in `reward.json`; see `choose_reward`.

    Returns:
        Two values: the tasks, sorted by directory name, and the reasons why other directories are not valid tasks, by
        directory name. Plain files, and hidden directories without a task.toml, are ignored.

    Raises:
        TaskError: The directory does not exist, or the task is invalid.
        OSError: The folder cannot be read.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise TaskError(f"{root}: no such directory. Set env.path=<directory> to a task or a folder of tasks.")
    if (root / TASK_TOML).exists():
        return [load_task(root, reward_key=reward_key)], {}
    tasks: dict[str, HarborTask] = {}
    skipped: dict[str, str] = {}
    for child in sorted(root.iterdir(), key=lambda path: path.name):
        if not child.is_dir() or (child.name.startswith(".") and not (child / TASK_TOML).exists()):
            continue
        try:
            task = load_task(child, reward_key=reward_key, links_within=root)
            if not task.config.environment.docker_image and not (task.path / "environment").is_dir():
                raise TaskError(f"{task.path}: expected environment/ or [environment].docker_image, found neither.")
            if (known := tasks.setdefault(task.name, task)) is not task:
                raise TaskError(f"{child}: {known.path} already has the name {task.name!r}. Rename the directory.")
        except (TaskError, OSError) as error:
            skipped[child.name] = str(error)
    return list(tasks.values()), skipped


class TaskFolder:
    """A source of tasks: a local folder of tasks, or a single task.

    Attributes:
        path: The folder that contains all tasks.
        loads_offline: Whether `load` reads only local files.
    """

    loads_offline = True

    def __init__(self, path: Path) -> None:
        """Stores `path`, a folder of tasks or a single task. Raises `ConfigError` if `path` is a URL."""
        refuse_url("path", path, "for a repository of tasks, use `env.repo=<url>`")
        self.path = path

    def load(self, select: Select, report: Callable[[str], None], *, reward_key: str | None) -> list[HarborTask]:
        """Reads all tasks, and returns the selected tasks. Blocking.

        Args:
            select: Function that selects tasks.
            report: Callback for warnings that do not stop the run, such as directories without a valid task.
            reward_key: See `load_task_set`.

        Raises:
            UserError: The folder has no valid task, or no task is selected.
        """
        tasks, skipped = load_task_set(self.path, reward_key=reward_key)
        if not tasks:
            reasons = "; ".join(f"{name}: {why}" for name, why in [*skipped.items()][:5]) or "it has no sub-directories"
            raise TaskError(f"{self.path}: expected directories with a task.toml, found no valid task ({reasons}).")
        warnings = TaskWarnings()
        for name, reason in skipped.items():
            warnings.add(name, [f"skipped, because it is not a valid task: {reason}"])
        warnings.tell(report, "directories")
        return select(tasks)

    def stop(self) -> None:
        """Does nothing, because `load` is fast. `ListedTasks.stop` stops a `load` that runs in another thread."""


def refuse_url(option: str, path: Path | None, remedy: str) -> None:
    """Raises `ConfigError` if `path`, the value of `env.<option>`, is a URL. `remedy` is the fix in the message."""
    if path is not None and (found := _URL.match(str(path))) is not None:
        url = f"{found[1]}//{str(path)[found.end() :]}"  # as a path, it has lost a slash
        raise ConfigError(f"Expected `env.{option}` to be a path, got the URL {url}: {remedy}.")


SHOWN_NAMES = 3
SHOWN_NUMBERS = 3
SHOWN_PROBLEMS = 10
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class TaskWarnings:
    """Collects warnings about tasks, and merges similar warnings into one sentence.

    Two warnings are similar if they differ only in the task's name and in numbers, such as limits.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, list[tuple[str, str]]] = {}

    def add(self, task_name: str, sentences: Iterable[str]) -> None:
        """Adds warnings about a task. The sentences may start with the name of the task."""
        for sentence in sentences:
            text = sentence.removeprefix("Task ").removeprefix(f"{task_name}: ")
            kind = _NUMBER.sub("0", _nameless(text, task_name))
            self._kinds.setdefault(kind, []).append((task_name, text))

    def tell(self, report: Callable[[str], None], what: str = "tasks") -> None:
        """Passes the collected warnings to `report`, and removes them.

        `what` is the plural noun in the warnings, such as `tasks`. If a warning affects many tasks, it shows only the
        first names, and a log message contains all names.
        """
        kinds, self._kinds = self._kinds, {}
        for told in kinds.values():
            names = list(dict.fromkeys(name for name, _ in told))
            texts = list(dict.fromkeys(text for _, text in told))
            if len(names) == 1:
                for text in texts:
                    report(f"{names[0]}: {text}")
                continue
            shown, more = ", ".join(names[:SHOWN_NAMES]), len(names) - SHOWN_NAMES
            report(f"{len(names):,} {what}: {_joined(told)} ({shown}{f' and {more:,} more' if more > 0 else ''})")
            if more > 0:
                logger.info("%s: %s", _joined(told), ", ".join(names))


def refusal(problems: Mapping[str, str], selected: int) -> str:
    """Returns an error message with the problems of tasks.

    `problems` contains the problems by task name. If fewer than `selected` tasks have problems, the message also
    suggests the option that excludes these tasks.
    """
    shown = list(problems.values())[:SHOWN_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(f"… and {len(problems) - len(shown)} more.")
    if len(problems) < selected:
        shown.append(f"To run the other tasks: env.exclude=[{','.join(list(problems)[:SHOWN_PROBLEMS])}].")
    return "\n".join(shown)


def _nameless(text: str, name: str) -> str:
    return re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "…", text)


def _joined(told: list[tuple[str, str]]) -> str:
    """Merges similar sentences into one sentence without task names. Differing numbers are shown as `60/120`."""
    texts = [_nameless(text, name) for name, text in told]
    numbers = [list(dict.fromkeys(column)) for column in zip(*map(_NUMBER.findall, texts), strict=True)]
    parts = _NUMBER.split(texts[0])
    shown = ["/".join(some[:SHOWN_NUMBERS]) + ("/…" if len(some) > SHOWN_NUMBERS else "") for some in numbers]
    return "".join(part + number for part, number in zip(parts, [*shown, ""], strict=True))
