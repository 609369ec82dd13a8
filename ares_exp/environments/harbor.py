"""`env=harbor`: environments that run Harbor-format tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar

from pydantic import Field, validate_call

from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.source import Entry, EpisodeParts, Report, SelectingSource
from ares_exp.errors import TaskError, UnsupportedTaskError
from ares_exp.tasks.harbor_task import HarborTask
from ares_exp.tasks.task_contract import Task, TaskOrigin
from ares_exp.tasks.task_files import read_extra_instruction, with_files
from ares_exp.tasks.task_set import SAMPLES, TaskFolder, TaskWarnings, refusal

if TYPE_CHECKING:
    from ares_exp.tasks.task_sources.task_lists import ListedTasks

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]

log = logging.getLogger(__name__)


class CheckedTask(Task, Protocol):
    """A task that a source can check before a run, and whose changes it can detect."""

    @property
    def digest(self) -> str:
        """Digest that changes if the task changes. May read all files of the task."""

    def check_runnable(self, *, needs_solution: bool, supported: frozenset[str] | None) -> None:
        """Raises `TaskError` if the task cannot be run, for example because a required solution is missing.

        `supported` contains the names of the `AgentContext` parts that the agent supports. `None` skips this check.
        """


T = TypeVar("T", bound=CheckedTask)


class CodeEnvironments(SelectingSource[T]):
    """A base class for sources whose tasks run in a `CodeEnvironment`, that is, in a container with a code agent."""

    exports_state = True

    @property
    def tasks(self) -> Sequence[T]:
        """Selected tasks in order."""
        return list(self._selected.values())

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Raises `UnsupportedTaskError` if selected tasks cannot be run with `parts`. The message names these tasks."""
        warnings, problems = TaskWarnings(), dict[str, str]()
        for task in self._selected.values():
            try:
                warnings.add(task.name, check_task(task, parts))
            except TaskError as error:
                problems[task.name] = str(error)
        warnings.tell(report)
        if problems:
            raise UnsupportedTaskError(refusal(problems, len(self._selected)))

    def digest(self, task_name: str) -> str:
        """Returns the digest of a task."""
        return self._selected[task_name].digest

    def make(self, task_name: str, parts: EpisodeParts) -> CodeEnvironment:
        """Creates the environment of one episode."""
        return CodeEnvironment.for_episode(self._selected[task_name], parts)


def check_task(task: CheckedTask, parts: EpisodeParts) -> list[str]:
    """Checks that a task can be run with the container, the agent and the limits in `parts`.

    Returns warnings about limits that the container backend will not enforce.

    Raises:
        TaskError: The task cannot be run.
    """
    is_oracle = parts.provide_solution
    task.check_runnable(needs_solution=is_oracle, supported=None if is_oracle else parts.code_agent_factory.supports)
    return parts.check_containers(task)


class HarborEnvironments(CodeEnvironments[HarborTask]):
    """A source of Harbor tasks from a folder, a `registry.json` or git repositories."""

    @validate_call
    def __init__(
        self,
        *,
        path: Path | None = None,
        registry: Path | None = None,
        dataset: str | None = None,
        git_url: str | None = None,
        git_commit: str | None = None,
        repo: str | None = None,
        cache_dir: Path | None = None,
        git_timeout_sec: Seconds = 600.0,
        tasks: Entry | list[Entry] | None = None,
        exclude: str | list[str] | None = None,
        limit: Annotated[int, Field(ge=1)] | None = None,
        reward_key: str | None = None,
        extra_instruction_paths: list[Path] | None = None,
        extra_instructions: list[str] | None = None,
    ) -> None:
        """Validates the options.

        Args:
            path: Folder of tasks, or of one task. With `git_url`: folder of the task in the repository. With `repo`:
                folder of tasks in the repository. With `registry`: folder into which symbolic links in local tasks may
                point. If no option sets a source of tasks, the bundled samples run.
            registry: Path of a `registry.json`; with `repo`, a path in the repository.
            dataset: Data set of the registry, `name[@version]`, such as `terminal-bench@2.0`. Without `registry` and
                `repo`, Harbor's own registry is used.
            git_url: Git repository that contains one task, in the folder `path`.
            git_commit: Commit, branch or tag of `git_url`; `None` for the default branch.
            repo: Repository of tasks: `org/name[@ref]`, `git@host:org/name[@ref]`, or a URL that may end with
                `/tree/<ref>/<folder>`.
            cache_dir: Cache directory for tasks from repositories; `None` for `~/.cache/ares_exp/tasks`.
            git_timeout_sec: Time limit in seconds of one git command.
            tasks: Tasks to run: a name, glob, index (`5`), slice (`0:10`) or shard (`@2/8`), or a list of these; `None`
                for all tasks.
            exclude: Names or globs of tasks to leave out.
            limit: Maximum number of tasks.
            reward_key: Key of the reward in `reward.json`, which the tests write. Required only if the file has several
                keys and none of them is `reward`.
            extra_instruction_paths: Files whose contents are appended to every instruction, each after a blank line.
            extra_instructions: Strings that are appended to every instruction, after the contents of
                `extra_instruction_paths`.
        """
        super().__init__("harbor", tasks=tasks, exclude=exclude, limit=limit)
        self._source: TaskFolder | ListedTasks
        if all(one is None for one in (registry, dataset, git_url, git_commit, repo)):
            self._source = TaskFolder(path or SAMPLES)
        else:
            from ares_exp.tasks.task_sources.task_lists import listed_tasks

            self._source = listed_tasks(
                path=path,
                registry=registry,
                dataset=dataset,
                git_url=git_url,
                git_commit=git_commit,
                repo=repo,
                cache_dir=cache_dir,
                git_timeout_sec=git_timeout_sec,
            )
        self._reward_key = reward_key
        self._extra_instruction_paths = extra_instruction_paths or []
        self._extra_instructions = extra_instructions or []
        self._extra_texts: dict[str, str] = {}

    @property
    def path(self) -> Path | None:
        """The folder that contains all tasks; `None` if the tasks are not in one folder."""
        return self._source.path

    @property
    def loads_offline(self) -> bool:
        """Whether `load` reads only local files."""
        return self._source.loads_offline

    @property
    def origins(self) -> Mapping[str, TaskOrigin]:
        """Git repositories and commits of the selected tasks."""
        return {name: task.origin for name, task in self._selected.items() if task.origin is not None}

    def load(self, report: Report) -> Sequence[str]:
        """Selects tasks, and fetches only these. Passes a warning to `report` about invalid tasks in a folder."""
        chosen = self._source.load(self._choose, report, reward_key=self._reward_key)
        texts = [read_extra_instruction(path) for path in self._extra_instruction_paths]
        files = (str(path.resolve()) for path in self._extra_instruction_paths)
        self._extra_texts = dict(zip(files, texts, strict=True))
        extra = [*texts, *self._extra_instructions]
        return self._hold([task.with_extra_instructions(extra) if extra else task for task in chosen])

    async def close(self) -> None:
        """Stops a `load` that is still running in a thread."""
        self._source.stop()

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Passes warnings about `task.toml` files to `report`, and checks the tasks; see `CodeEnvironments.check`."""
        own, fetched = TaskWarnings(), TaskWarnings()
        for task in self._selected.values():
            (own if task.origin is None else fetched).add(task.name, task.warnings)
        own.tell(report)
        fetched.tell(log.info)  # users cannot correct the task.toml of a fetched task
        super().check(parts, report=report)

    def digest(self, task_name: str) -> str:
        """Computes the digest of a task's files and of its extra instructions. Blocking."""
        return with_files(super().digest(task_name), self._extra_texts)
