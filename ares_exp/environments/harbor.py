"""`env=harbor`: environments that play Harbor-format tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.containers.container import ContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.source import EpisodeParts, Report
from ares_exp.errors import TaskError, UnsupportedTaskError
from ares_exp.tasks.harbor import HarborTask
from ares_exp.tasks.selection import select
from ares_exp.tasks.task_set import SAMPLES, load_task_set
from ares_exp.tasks.time_limits import TimeLimits

Entry = int | str
SHOWN_REFUSALS = 10


class HarborEnvironments:
    """A folder of Harbor tasks, or one task, as a source of environments."""

    exports_state = True

    @validate_call
    def __init__(
        self,
        *,
        path: Path | None = None,
        tasks: Entry | list[Entry] | None = None,
        exclude: str | list[str] | None = None,
        limit: Annotated[int, Field(ge=1)] | None = None,
        reward_key: str | None = None,
    ) -> None:
        """Validates the options; reads nothing yet.

        Args:
            path: A folder of tasks, or one task; `None` for the bundled samples.
            tasks: What to play: names, globs, indexes (`5`), slices (`0:10`), shards (`@2/8`); `None` for all.
            exclude: Names or globs to leave out.
            limit: At most so many tasks.
            reward_key: Which key of `reward.json` is the reward, where there are several and none is `reward`.
        """
        self._root = path or SAMPLES
        self._selector = tasks
        self._exclude = exclude
        self._limit = limit
        self._reward_key = reward_key
        self._tasks: dict[str, HarborTask] = {}

    @property
    def path(self) -> Path | None:
        """Where the tasks lie."""
        return self._root

    @property
    def tasks(self) -> Sequence[HarborTask]:
        """What `load` selected, in order."""
        return list(self._tasks.values())

    def load(self, report: Report) -> Sequence[str]:
        """Reads the folder and applies the selection; directories that are no valid task are reported by name."""
        found = load_task_set(self._root, reward_key=self._reward_key)
        for skipped in found.skipped:
            report(f"skipped {skipped.name}, which is no valid task: {skipped.reason}")
        chosen = select(found.tasks, tasks_selector=self._selector, exclude=self._exclude, limit=self._limit)
        self._tasks = {task.name: task for task in chosen}
        return list(self._tasks)

    def check(
        self, container_factory: ContainerFactory, *, time_limits: TimeLimits, provide_solution: bool, report: Report
    ) -> None:
        """Refuses tasks that cannot be played on that backend, all of them in one message."""
        for task in self._tasks.values():
            _each(report, task.warnings)
        checks: tuple[Callable[[HarborTask], object], ...] = (
            lambda task: task.check_runnable(needs_solution=provide_solution),
            lambda task: _each(
                report, (f"{task.name}: {text}" for text in container_factory.check(time_limits.container_spec(task)))
            ),
        )
        refused = {name: text for name, task in self._tasks.items() if (text := _first_refusal(task, checks))}
        if refused:
            shown = list(refused.values())[:SHOWN_REFUSALS]
            shown += [f"… and {len(refused) - len(shown)} more."] if len(refused) > len(shown) else []
            shown.append(f"To play the others: env.exclude=[{','.join(list(refused)[:SHOWN_REFUSALS])}].")
            raise UnsupportedTaskError("\n".join(shown))

    def digest(self, task_name: str) -> str:
        """What tells whether the files of a task have changed. Blocking."""
        return self._tasks[task_name].digest

    def make(self, task_name: str, parts: EpisodeParts) -> CodeEnvironment:
        """The environment of one episode."""
        return CodeEnvironment(
            [self._tasks[task_name]],
            container_factory=parts.container_factory,
            code_agent_factory=parts.code_agent_factory,
            limits=parts.limits,
            seed=parts.seed,
            provide_solution=parts.provide_solution,
            output_dir=parts.output_dir,
            start_from=parts.start_from,
        )


def _first_refusal(task: HarborTask, checks: Sequence[Callable[[HarborTask], object]]) -> str | None:
    try:
        for check in checks:
            check(task)
    except TaskError as error:
        return str(error)
    return None


def _each(report: Report, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        report(sentence)
