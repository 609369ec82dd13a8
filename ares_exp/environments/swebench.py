"""`env=swebench`: environments that play the problems of SWE-bench."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, validate_call

from ares_exp.cancellation import finish
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.refusals import refuse_together
from ares_exp.environments.source import EpisodeParts, Report, SourceBase
from ares_exp.errors import ConfigError
from ares_exp.tasks.child_process import ChildProcess
from ares_exp.tasks.selection import select
from ares_exp.tasks.swebench.build_context import GITHUB, BuildOptions, make_context
from ares_exp.tasks.swebench.dataset import find_dataset, load_rows
from ares_exp.tasks.swebench.eval_commands import check_command
from ares_exp.tasks.swebench.instance_images import check_template
from ares_exp.tasks.swebench.official import official_version
from ares_exp.tasks.swebench.swebench_task import SweBenchOptions, SweBenchTask, check_log_parser
from ares_exp.tasks.task_sources.git_command import Git
from ares_exp.tasks.task_warnings import TaskWarnings

Entry = int | str
Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]


class SweBenchEnvironments(SourceBase):
    """Rows of SWE-bench as a source of environments."""

    exports_state = True

    @validate_call
    def __init__(
        self,
        *,
        dataset: str,
        split: str = "test",
        tasks: Entry | list[Entry] | None = None,
        exclude: str | list[str] | None = None,
        limit: Annotated[int, Field(ge=1)] | None = None,
        hints: bool = False,
        agent_network: Literal["public", "no-network"] = "public",
        image_template: str | None = None,
        build: bool = False,
        base_image: str = "python:3.12-slim",
        repository: str = GITHUB,
        setup: list[str] | None = None,
        pip_packages: list[str] | None = None,
        install: list[str] | None = None,
        cache_dir: Path | None = None,
        fetch_timeout_sec: Seconds = 1800.0,
        test_command: str | None = None,
        log_parser: str | None = None,
        test_timeout_sec: Seconds = 1800.0,
        grader: Literal["auto", "official", "own"] = "auto",
    ) -> None:
        """Validates the options; reads nothing yet.

        Args:
            dataset: `verified`, `lite`, `full`, the name of another data set of the Hugging Face hub, or a file of rows
                (`.jsonl`, `.json`, `.parquet`).
            split: Which part of a data set of the hub.
            tasks: What to play: names, globs, indexes (`5`), slices (`0:10`), shards (`@2/8`), one or a list;
                `None` for all.
            exclude: Names or globs to leave out.
            limit: At most so many tasks.
            hints: Whether agents are told what was said under the issue.
            agent_network: `public` or `no-network`: what agents may reach. Fixes can be found in a network; the tests
                always have one.
            image_template: Names of images, with `{id}` in them; `None`: the row's, or
                `swebench/sweb.eval.x86_64.{id}:latest`.
            build: Whether images are built here instead, from the options that follow.
            base_image: What images that are built here start with.
            repository: Where the repositories are: an address, with `{repo}` in it for `owner/name`, or a folder, with
                each at `owner/name` or with the only one.
            setup: Shell commands before the repository is there; git has to be in the image after them.
            pip_packages: Packages for the Python of the image.
            install: Shell commands in the repository, last.
            cache_dir: Where repositories and build contexts are kept; `None`: `~/.cache/ares_exp/swebench`.
            fetch_timeout_sec: What loading the data set, and one git command, may take.
            test_command: Shell command that runs the tests, with `{files}` or `{modules}` in it; `None`: the row's
                script, or pytest.
            log_parser: What reads its output; `None`: what the row says, or `pytest`.
            test_timeout_sec: What the tests of one episode may take.
            grader: `auto`: the official harness (package swebench) for rows with an `eval_script`, as those of the
                published data sets, and for formats that it alone can read, else ours; `official`, `own`: one of them.

        Raises:
            ConfigError: An option is wrong, or the harness is not installed and to grade.
        """
        if grader == "official" and official_version() is None:
            raise ConfigError(
                "env.grader=official needs the package swebench, 5 or newer: `pip install 'ares-exp[swebench]'`."
            )
        builds = BuildOptions(
            base_image, repository, tuple(setup or ()), tuple(pip_packages or ()), tuple(install or ()), cache_dir
        )
        self._options = SweBenchOptions(
            hints=hints,
            agent_network=agent_network,
            image_template=check_template(image_template),
            build=builds if build else None,
            test_command=check_command(test_command),
            log_parser=check_log_parser(log_parser),
            test_timeout_sec=test_timeout_sec,
            grader=grader,
        )
        self._dataset = find_dataset(dataset, split)
        self._selector = tasks
        self._exclude = exclude
        self._limit = limit
        self._fetch_timeout_sec = fetch_timeout_sec
        self._child = ChildProcess()
        self._git = Git(timeout_sec=fetch_timeout_sec)
        self._tasks: dict[str, SweBenchTask] = {}

    @property
    def path(self) -> Path | None:
        """The file of rows; `None` for a data set of the hub."""
        return self._dataset.file

    @property
    def loads_offline(self) -> bool:
        """Whether the rows are in a file."""
        return self._dataset.file is not None

    @property
    def tasks(self) -> Sequence[SweBenchTask]:
        """The tasks that `load` selected, in order."""
        return list(self._tasks.values())

    def load(self, report: Report) -> Sequence[str]:
        """Reads the rows and applies the selection."""
        rows = load_rows(self._dataset, child=self._child, timeout_sec=self._fetch_timeout_sec)
        found = [SweBenchTask(row, self._options, self._dataset.source) for row in rows]
        chosen = select(
            found, tasks_selector=self._selector, exclude=self._exclude, limit=self._limit, preset="swebench"
        )
        self._tasks = {task.name: task for task in chosen}
        return list(self._tasks)

    def keep(self, task_names: Sequence[str]) -> None:
        """Leaves out the other tasks that `load` selected."""
        self._tasks = {name: self._tasks[name] for name in task_names}

    async def preflight(self) -> None:
        """Fetches the repositories that images are to be built with, unless they are in the cache.

        Raises:
            PreflightError: One cannot be had.
        """
        if self._options.build is not None:
            making = asyncio.ensure_future(asyncio.to_thread(self._make_contexts, self._options.build))
            try:
                await asyncio.shield(making)
            except asyncio.CancelledError:
                self._git.stop()
                await finish(asyncio.wait({making}))
                raise

    def _make_contexts(self, options: BuildOptions) -> None:
        for task in self._tasks.values():
            make_context(task.row, options, self._git)

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Refuses tasks that cannot be played with these parts, all of them in one message."""
        warnings = TaskWarnings()

        def check(task: SweBenchTask) -> None:
            task.check_runnable(needs_solution=parts.provide_solution)
            warnings.add(task.name, parts.check_containers(task))

        try:
            refuse_together(self._tasks.values(), check)
        finally:
            warnings.tell(report)
        build = self._options.build
        if build is not None and not build.may_install("pytest") and any(task.needs_pytest for task in self.tasks):
            report(
                "tests are run by pytest, which none of env.pip_packages, env.install and env.setup names: unless "
                f"{build.base_image} has it they cannot start. Set env.pip_packages=[pytest]."
            )
        guessed = [task for task in self._tasks.values() if not task.row.eval_script]
        if guessed and self._options.test_command is None:
            report(
                f"{len(guessed)} of {len(self._tasks)} rows have no eval_script: their tests are run by `python -m "
                "pytest`. Set env.test_command if that is not right."
            )

    def digest(self, task_name: str) -> str:
        """Returns the digest of a row and of how it is played and graded."""
        return self._tasks[task_name].digest

    def make(self, task_name: str, parts: EpisodeParts) -> CodeEnvironment:
        """Returns the environment of one episode."""
        return CodeEnvironment.for_episode(self._tasks[task_name], parts)

    async def close(self) -> None:
        """Ends the threads that still fetch rows or repositories."""
        await asyncio.to_thread(self._child.stop)
        self._git.stop()
