"""The tasks of a check, and its two runs: one with the solutions, one with an agent that does nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.agents.code_agent import as_agent_factory
from ares_exp.config.targets import instantiate_group
from ares_exp.containers.container import as_container_factory
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.harbor import check_task
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import ConfigError, TaskError
from ares_exp.tasks.harbor_task import empty_instructions, load_task
from ares_exp.tasks.task_files import INSTRUCTION
from ares_exp.tasks.task_toml import TASK_TOML

if TYPE_CHECKING:
    from omegaconf import DictConfig
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby

from ares_exp.config.overrides import quoted
from ares_exp.errors import UserError
from ares_exp.records import exit_codes
from ares_exp.records.recorded_results import read_results
from ares_exp.records.results import EpisodeResult, final_results
from ares_exp.records.run_dir import RunDir, write_atomically
from ares_exp.records.terminal_text import count_of

SIGNS = (TASK_TOML, INSTRUCTION, "tests/test.sh")
"""Files that identify a task. Even a broken task has at least one of them."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder to check as a task.

    Attributes:
        path: Folder, as the user named it.
        shared: Folder of tasks that links of the task may point into; `None` if the task's links must stay in the task.
        problem: Reason why the task cannot be run; `None` if it can.
    """

    path: Path
    shared: Path | None = None
    problem: str | None = None

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.path.resolve().name


def find_candidates(paths: Sequence[Path]) -> list[Candidate]:
    """Finds and reads the tasks at paths. Each path is a task or a folder of tasks.

    Tasks may share files of their folder only if this folder is the only path.

    Raises:
        ConfigError: A path is not a folder, a folder contains no task, or two tasks have the same name.
    """
    folders = {folder.resolve(): folder for path in paths for folder in _folders(path.expanduser())}
    counted = Counter(real.name for real in folders)
    if twice := sorted(name for name, count in counted.items() if count > 1):
        raise ConfigError(
            f"Expected tasks with unique names, but several are named {', '.join(twice)}. Check them one by one."
        )
    only = paths[0].expanduser() if len(paths) == 1 else None
    return [_read(Candidate(folder, only if folder != only else None)) for folder in folders.values()]


def with_problems(candidates: Sequence[Candidate], config: DictConfig) -> list[Candidate]:
    """Adds to each task the reason why the containers or the agent of a config, or the oracle, would reject it.

    Raises:
        ConfigError: The options of the containers or the agent are invalid.
    """
    containers = as_container_factory(instantiate_group(config, "container"))
    agents = as_agent_factory(instantiate_group(config, "agent"))
    parts = EpisodeParts(containers, agents, EpisodeLimits(), seed=0)
    return [one if one.problem is not None else _checked(one, parts) for one in candidates]


async def check_containers(config: DictConfig) -> None:
    """Checks that the containers of a config can be used.

    Raises:
        UserError: The containers cannot be used.
    """
    containers = as_container_factory(instantiate_group(config, "container"))
    try:
        await containers.preflight()
    finally:
        await containers.close()


def _folders(path: Path) -> list[Path]:
    """Returns the path itself if it is a task, or otherwise the tasks in the folder."""
    if not path.is_dir():
        raise ConfigError(f"There is no folder {path}. Name a task or a folder of tasks.")
    if (path / TASK_TOML).exists():
        return [path]
    children = [child for child in sorted(path.iterdir()) if _looks_like_a_task(child)]
    if not children and not _looks_like_a_task(path):
        raise ConfigError(
            f"Expected a task or a folder of tasks, but neither {path} nor a folder in it has a "
            f"{TASK_TOML}. `ares-exp task new {path / 'my-task'}` creates one."
        )
    return [path] if _looks_like_a_task(path) else children


def _looks_like_a_task(folder: Path) -> bool:
    return folder.is_dir() and any((folder / sign).exists() for sign in SIGNS)


def _read(candidate: Candidate) -> Candidate:
    try:
        task = load_task(candidate.path, links_within=candidate.shared)
    except (TaskError, OSError) as error:
        return replace(candidate, problem=str(error))
    if empty := empty_instructions(task.stages):
        return replace(candidate, problem=f"{empty[0]} is empty. Describe in it what the agent has to do.")
    return candidate


def _checked(candidate: Candidate, parts: EpisodeParts) -> Candidate:
    """Adds the problem with which the run of the solution, or the run without it, would reject the task."""
    try:
        task = load_task(candidate.path, links_within=candidate.shared)
        for provide_solution in (False, True):
            check_task(task, replace(parts, provide_solution=provide_solution))
    except (TaskError, OSError) as error:
        return replace(candidate, problem=str(error))
    return candidate


TASK_LIST = "tasks.json"
DATASET = "checked"
SOLUTION, NOTHING = "solution", "nothing"
"""Names of the run directories."""
POLICIES = {SOLUTION: "oracle", NOTHING: "noop"}
TERMINATED = 143


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A finished run.

    Attributes:
        path: Run directory.
        attempts: Attempts at each task, by task name.
    """

    path: Path
    attempts: Mapping[str, Sequence[EpisodeResult]]

    @property
    def results(self) -> list[EpisodeResult]:
        """The results of all attempts."""
        return [result for attempts in self.attempts.values() for result in attempts]


def run_both(
    tasks: Sequence[Candidate], folder: Path, *, overrides: Sequence[str], flags: Sequence[str] = ()
) -> dict[str, CheckedRun]:
    """Runs the tasks' solutions, then an agent that does nothing.

    Args:
        tasks: Tasks without a problem.
        folder: Folder of the run directories `solution` and `nothing`.
        overrides: Overrides for both runs.
        flags: Flags for both commands.

    Returns:
        The runs by name, `solution` and `nothing`.

    Raises:
        UserError: A run was rejected or failed. The message is the run's error message.
        KeyboardInterrupt: A run was interrupted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / TASK_LIST
    rows = [{"name": one.name, "path": str(one.path.resolve())} for one in tasks]
    row = {"name": DATASET, "version": "1", "description": "What ares-exp task check has run.", "tasks": rows}
    write_atomically(listed, json.dumps([row], indent=2))
    words = [*flags, "env=harbor", f"env.registry={quoted(str(listed))}", f"env.dataset={DATASET}"]
    words += [f"env.path={quoted(str(shared.resolve()))}" for shared in {one.shared for one in tasks} if shared]
    words += ["name=task-check", *overrides]
    words += [] if any(one.startswith("tracker=") for one in overrides) else ["tracker=none"]
    ran: dict[str, CheckedRun] = {}
    try:
        for name, what in ((SOLUTION, "the solutions of"), (NOTHING, "an agent that does nothing, on")):
            _tell(f"Running {what} {count_of(len(tasks), 'task')}")
            run = folder / name
            _execute([*words, f"policy={POLICIES[name]}", f"hydra.run.dir={quoted(str(run))}"])
            ran[name] = CheckedRun(run, _attempts(run))
    except BaseException:
        if not (folder / SOLUTION).exists():  # the run was rejected or interrupted before it started
            listed.unlink()
            with suppress(OSError):  # the folder contains other files
                folder.rmdir()
        raise
    return ran


def _execute(words: Sequence[str]) -> None:
    """Runs `python -m ares_exp` and prints its stderr. Its error message becomes the message of the raised error."""
    command = [sys.executable, "-m", "ares_exp", *words]
    complaint: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        with _ended_with_us(process):
            for line in process.stderr:
                if complaint or line.startswith("error: "):
                    complaint.append(line)
                else:
                    _tell(line.rstrip("\n"))
            code = process.wait()
    if code == exit_codes.INTERRUPTED:
        raise KeyboardInterrupt
    if code not in (exit_codes.COMPLETE, exit_codes.INCOMPLETE):
        said = "".join(complaint).removeprefix("error: ").strip()
        raise UserError(said or f"`{' '.join(command)}` ended with exit code {code}.")


@contextmanager
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ends a run with this process. Ctrl-C reaches both processes; SIGTERM is forwarded to the run."""

    def end(*_: object) -> None:
        process.terminate()
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        process.communicate()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _attempts(run: Path) -> dict[str, list[EpisodeResult]]:
    results = sorted(
        final_results(read_results(RunDir(run).episodes).results), key=lambda result: (result.task_name, result.attempt)
    )
    return {name: list(attempts) for name, attempts in groupby(results, key=lambda result: result.task_name)}


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
