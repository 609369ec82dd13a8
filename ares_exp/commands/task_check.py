"""The command `task check`: checks that tests accept the solution of a task and reject an agent that does nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from ares_exp.commands.cli.run_command import CommandParser, add_config_dir, print_progress
from ares_exp.config.overrides import quoted
from ares_exp.containers.container import ContainerFactoryBase
from ares_exp.environments.harbor import check_task
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import AresExpError, ConfigError, TaskError, UserError
from ares_exp.llms.response import TextData
from ares_exp.policies.oracle import SOLVING
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import CHECKS
from ares_exp.records.recorded_results import read_results
from ares_exp.records.results import HOST_IMAGE, EpisodeResult, Outcome, final_results
from ares_exp.records.run_dir import RunDir, fresh_dir, read_tail, write_atomically
from ares_exp.records.statistics.run_statistics import by_task
from ares_exp.records.terminal_text import count_of, draw, format_number, make_table, one_line, printable, write
from ares_exp.runs.components import composed_parts
from ares_exp.tasks.harbor_task import empty_instructions, load_task
from ares_exp.tasks.task_files import INSTRUCTION
from ares_exp.tasks.task_toml import TASK_TOML
from ares_exp.tasks.verification.verification import TEST_OUTPUT
from ares_exp.trajectories.records import EpisodeTrajectory, deserialize_llm_request, deserialize_llm_response

HELP = """\
Runs each task twice: with its own solution, which must pass, and with an agent that does nothing, which must not pass.
Both are ordinary runs with a run directory.
[arguments]
Examples:
  %(prog)s tasks/my-task
  %(prog)s tasks --container docker concurrency=4
  %(prog)s tasks/my-task attempts=5           finds tests that pass only sometimes
  %(prog)s tasks --json | jq '.tasks[] | select(.good | not) | .name'

Exit codes: 0 all tasks are good; 1 a task is invalid, its tests reject the solution, or its tests accept an agent that
does nothing; 2 the command line is wrong, or tasks cannot be run here; 130 interrupted.
"""
SCHEMA_VERSION = 1
OURS = ("policy", "tracker.path", "resume", "replay", "branch_from", "hydra.run.dir", "hydra.sweep.dir", "env", "name")
TASKS_OF_ENV = ("path", "registry", "dataset", "git_url", "git_commit", "repo", "tasks", "exclude", "limit")
SIGNS = (TASK_TOML, INSTRUCTION, "tests/test.sh")
"""Files that identify a task. A folder with one of them is checked as a task, even if the others are missing."""
TASK_LIST = "tasks.json"
DATASET = "checked"
SOLUTION, NOTHING = "solution", "nothing"
"""Names of the two run directories: of the run with the solutions, and of the run with an agent that does nothing."""
POLICIES = {SOLUTION: "oracle", NOTHING: "noop"}
TERMINATED = 143
TAIL_LINES = 15
TAIL_BYTES = 4096
SHOWN_OUTPUT = re.compile(r"<exit_code>(-?\d+)</exit_code>\s*<output>\n(.*)\n</output>\s*", re.DOTALL)
"""Pattern of the message in which the shell agent shows the exit code and the uncut output of a command."""


def add_arguments(command: CommandParser) -> None:
    command.add_argument(
        "arguments",
        nargs="+",
        metavar="PATH",
        help="a task or a folder of tasks, and overrides (key=value) as for a run",
    )
    command.add_argument(
        "--container", metavar="NAME", help="where the tasks run: local, docker, podman or daytona (local)"
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for both runs (outputs/task-check/<date>_<time>)"
    )
    add_config_dir(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    paths, overrides = _taken_apart(arguments.arguments)
    if arguments.container is not None:
        overrides = [f"container={arguments.container}", *overrides]
    words = ["env=harbor", "policy=oracle", "tracker=none", *overrides]
    config, parts = composed_parts(words, arguments.config_dir)
    candidates = find_candidates(paths, parts)
    runnable = [one for one in candidates if one.problem is None]
    ran: dict[str, CheckedRun] = {}
    if runnable:
        asyncio.run(_check_backend(parts.container_factory))  # before the line that reports running tasks
        out = _place(arguments.out)
        flags = [f"--config-dir={folder}" for folder in arguments.config_dir]
        ran = run_both(runnable, out, overrides=overrides, flags=flags)
    verdicts = [judge(one, ran, threshold=config.reward_threshold) for one in candidates]
    _print(verdicts, ran, as_json=arguments.json)
    return exit_codes.COMPLETE if all(verdict.is_good for verdict in verdicts) else exit_codes.INCOMPLETE


def _taken_apart(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Splits the arguments into paths and overrides. An existing file or folder is a path, even if it contains `=`.

    Raises `ConfigError` for overrides of keys that the command sets itself.
    """
    overrides = [one for one in arguments if "=" in one and not Path(one).exists()]
    paths = [Path(one) for one in arguments if one not in overrides]
    refused = (*OURS, *(f"env.{key}" for key in TASKS_OF_ENV))
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in refused or key.startswith("policy."):
            raise ConfigError(
                f"`{key}` cannot be set here: `task check` sets the tasks, the policies and the run directories. Pass "
                "the paths of tasks, and use `--out` for the directory of the runs."
            )
    if not paths:
        raise ConfigError("Expected the path of a task, or of a folder of tasks: ares-exp task check tasks/my-task.")
    return paths, overrides


def _place(out: Path | None) -> Path:
    if out is None:
        return Path(fresh_dir(str(CHECKS / f"{datetime.now():%Y-%m-%d_%H-%M-%S}")))
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"The folder `--out {out}` is not empty. Choose another folder.")
    return out


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder to check as a task.

    Attributes:
        path: The folder.
        shared: Folder of tasks into which symbolic links in the task may point; `None` if they must stay in the task.
        problem: Reason why the task cannot be run; `None` if it can be run.
    """

    path: Path
    shared: Path | None = None
    problem: str | None = None

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.path.resolve().name


def find_candidates(paths: Sequence[Path], parts: EpisodeParts) -> list[Candidate]:
    """Finds and checks the tasks at the paths, each of which is a task or a folder of tasks.

    If there is one path, and it is a folder of tasks, symbolic links in the tasks may point into this folder. The
    problem of a task is an error in its files, or the reason why the containers, the agent or the oracle reject it.
    """
    folders = {folder.resolve(): folder for path in paths for folder in _folders(path.expanduser())}
    counted = Counter(real.name for real in folders)
    if twice := sorted(name for name, count in counted.items() if count > 1):
        raise ConfigError(
            f"Expected tasks with unique names, but several are named {', '.join(twice)}. Check them one by one."
        )
    only = paths[0].expanduser() if len(paths) == 1 else None
    found = [Candidate(folder, only if folder != only else None) for folder in folders.values()]
    return [replace(one, problem=_problem_of(one, parts)) for one in found]


async def _check_backend(containers: ContainerFactoryBase) -> None:
    """Checks that the container backend can be used. Raises `UserError` if it cannot."""
    try:
        await containers.preflight()
    finally:
        await containers.close()


def _folders(path: Path) -> list[Path]:
    """Returns the path itself if it is a task, otherwise the tasks in it. Raises `ConfigError` if it has no tasks."""
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


def _problem_of(candidate: Candidate, parts: EpisodeParts) -> str | None:
    try:
        task = load_task(candidate.path, links_within=candidate.shared)
        if empty := empty_instructions(task.stages):
            return f"{empty[0]} is empty. Describe in it what the agent has to do."
        for provide_solution in (False, True):
            check_task(task, replace(parts, provide_solution=provide_solution))
    except (TaskError, OSError) as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """One of the two finished runs, with its directory, and the results of its attempts by task name."""

    path: Path
    attempts: Mapping[str, Sequence[EpisodeResult]]


def run_both(
    tasks: Sequence[Candidate], folder: Path, *, overrides: Sequence[str], flags: Sequence[str] = ()
) -> dict[str, CheckedRun]:
    """Runs the tasks twice: with their solutions, and with an agent that does nothing.

    Returns both runs by name: `solution` and `nothing`. The run directories are `folder/solution` and `folder/nothing`.
    `overrides` and `flags` apply to both runs. If a run cannot start or fails, raises a `UserError` with its message.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / TASK_LIST
    rows = [{"name": one.name, "path": str(one.path.resolve())} for one in tasks]
    row = {"name": DATASET, "version": "1", "description": "The tasks that `ares-exp task check` ran.", "tasks": rows}
    write_atomically(listed, json.dumps([row], indent=2))
    words = [*flags, "env=harbor", f"env.registry={quoted(str(listed))}", f"env.dataset={DATASET}"]
    words += [f"env.path={quoted(str(shared.resolve()))}" for shared in {one.shared for one in tasks} if shared]
    words += ["name=task-check", *overrides]
    words += [] if any(one.startswith("tracker=") for one in overrides) else ["tracker=none"]
    ran: dict[str, CheckedRun] = {}
    try:
        for name, what in ((SOLUTION, "the solutions of"), (NOTHING, "an agent that does nothing, on")):
            print_progress(f"Running {what} {count_of(len(tasks), 'task')}")
            run = folder / name
            _execute([*words, f"policy={POLICIES[name]}", f"hydra.run.dir={quoted(str(run))}"])
            results = final_results(read_results(RunDir(run).episodes).results)
            ran[name] = CheckedRun(run, by_task(sorted(results, key=attrgetter("attempt"))))
    except BaseException:
        if not (folder / SOLUTION).exists():  # the run was rejected or interrupted before it started
            listed.unlink()
            with suppress(OSError):  # the folder contains other files
                folder.rmdir()
        raise
    return ran


def _execute(words: Sequence[str]) -> None:
    """Runs `python -m ares_exp` with the given words, and prints its stderr.

    If the command fails, raises a `UserError` with its message. If it is interrupted, raises `KeyboardInterrupt`.
    """
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
                    print_progress(line.rstrip("\n"))
            code = process.wait()
    if code == exit_codes.INTERRUPTED:
        raise KeyboardInterrupt
    if code not in (exit_codes.COMPLETE, exit_codes.INCOMPLETE):
        said = "".join(complaint).removeprefix("error: ").strip()
        raise UserError(said or f"`{' '.join(command)}` ended with exit code {code}.")


@contextmanager
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Makes SIGTERM to this process also end the process of a run, while the context is active.

    Ctrl-C reaches both processes. After Ctrl-C, the context waits for the end of the run.
    """

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


class Fault(StrEnum):
    """The kind of a problem that the check found."""

    INVALID = "invalid"
    SOLUTION_FAILS = "solution_fails"
    FLAKY = "flaky"
    TESTS_DO_NOT_TEST = "tests_do_not_test"
    TESTS_FAIL = "tests_fail"
    AGENT_FAILS = "agent_fails"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that the check found in a task.

    Attributes:
        fault: Kind of the problem.
        message: Description of the problem.
        outputs: Last lines that the solution and the tests printed: heading → lines (empty if there was no output).
        files: Folder with the files of the episode; `None` if it does not exist.
        episode: Path of the episode for `ares-exp show`; `None` if the task was not run.
    """

    fault: Fault
    message: str
    outputs: Mapping[str, str]
    files: Path | None = None
    episode: Path | None = None


@dataclass(frozen=True, slots=True)
class TaskVerdict:
    """The result of the check of one task. A good task has no problems.

    `solution` and `nothing` are the rewards of the attempts in the two runs; `None` for an attempt without a reward.
    """

    candidate: Candidate
    solution: tuple[float | None, ...]
    nothing: tuple[float | None, ...]
    problems: tuple[Problem, ...]

    @property
    def is_good(self) -> bool:
        """Whether the tests accept the solution and reject the agent that does nothing."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Returns the data for the JSON output. Paths are still `Path` objects."""
        return {
            "name": self.candidate.name,
            "path": self.candidate.path,
            "good": self.is_good,
            "solution": self.solution,
            "nothing": self.nothing,
            "problems": list(map(asdict, self.problems)),
        }


def judge(candidate: Candidate, ran: Mapping[str, CheckedRun], *, threshold: float) -> TaskVerdict:
    """Returns the verdict on a task from its results in the two runs `ran`. A reward of at least `threshold` passes.

    If `candidate.problem` is set, the task was not run, and the verdict contains only this problem.
    """
    if candidate.problem is not None:
        return TaskVerdict(candidate, (), (), (Problem(Fault.INVALID, candidate.problem, {}),))
    attempts = {name: ran[name].attempts.get(candidate.name, ()) for name in (SOLUTION, NOTHING)}
    rewards = {name: tuple(result.reward for result in attempts[name]) for name in attempts}
    problems = [
        _problem(*fault, result, RunDir(ran[name].path), of_solution=name == SOLUTION)
        for name in (SOLUTION, NOTHING)
        for result in attempts[name]
        if (fault := _fault(name, result, rewards[name], threshold)) is not None
    ]
    first = {(one.fault, one.message): one for one in reversed(problems)}  # the first attempt of each problem
    return TaskVerdict(candidate, rewards[SOLUTION], rewards[NOTHING], tuple(first.values())[::-1])


def _fault(
    name: str, result: EpisodeResult, rewards: Sequence[float | None], threshold: float
) -> tuple[Fault, str] | None:
    """Returns the fault that an attempt of the run `name` shows, with a message; `None` if it ended as expected."""
    reward = result.reward
    if reward is None and result.outcome is Outcome.AGENT_ERROR:
        said = "the agent failed, so the tests did not run (`task check` sends it one fenced bash block per response)"
        return Fault.AGENT_FAILS, said
    if reward is None and name == NOTHING:
        return Fault.TESTS_FAIL, "the tests write no reward for an agent that does nothing (expected 0)"
    is_passed = reward is not None and reward >= threshold
    if is_passed is (name == SOLUTION):
        return None
    shown = "no reward" if reward is None else f"reward {format_number(reward)}"
    if name == NOTHING:
        return Fault.TESTS_DO_NOT_TEST, f"an agent that does nothing has {shown}, so the tests do not check the work"
    has = shown if reward is None else f"{shown}, and at least {format_number(threshold)} is required"
    if passed := sum(one is not None and one >= threshold for one in rewards):
        return Fault.FLAKY, f"the solution passes in {passed} of {len(rewards)} attempts; another attempt has {has}"
    return Fault.SOLUTION_FAILS, f"the solution has {has}"


def _problem(fault: Fault, message: str, result: EpisodeResult, run: RunDir, *, of_solution: bool) -> Problem:
    files, error = run.files / result.episode_id, result.error
    if result.reward is None:
        why = result.outcome.value if error is None else f"{error.type}: {' '.join(error.message.split())}"
        message = f"{message}: {why}"
    said = _of_solve_scripts(run, result) if of_solution else {}
    tests = {f"the tests printed ({path.relative_to(files)})": _tail(path) for path in sorted(files.rglob(TEST_OUTPUT))}
    return Problem(
        fault,
        message,
        said | {what: text for what, text in tests.items() if text},
        files=files if files.is_dir() else None,
        episode=run.path / result.episode_id,
    )


def _of_solve_scripts(run: RunDir, result: EpisodeResult) -> dict[str, str]:
    """Returns the last lines that the solution printed in each stage: heading → lines. Empty without a trajectory."""
    try:
        episode = EpisodeTrajectory.load(run.trajectories / f"{result.episode_id}.json")
    except (OSError, AresExpError):
        return {}
    shown = [
        deserialize_llm_request(step.observation).messages[-1]["content"]
        for step in episode.steps
        if step.action is not None and step.observation is not None and _says(step.action, SOLVING)
    ]
    names = [stage.name for stage in result.stages] or [""]
    return dict(
        _printed(f"the solution of step {name}" if name else "the solution", str(text))
        for name, text in zip(names, shown, strict=False)  # a step without a response has no output
    )


def _printed(what: str, shown: str) -> tuple[str, str]:
    """Returns a heading that names the program `what`, and the last lines of its output, which `shown` contains."""
    found = SHOWN_OUTPUT.fullmatch(shown)
    text = _last_lines(shown if found is None else found[2])
    code = "" if found is None else f" (exit code {found[1]})"
    return f"{what} printed{'' if text else ' nothing'}{code}", text


def _says(action: Mapping[str, Any], text: str) -> bool:
    piece = deserialize_llm_response(action).data[0]
    return isinstance(piece, TextData) and text in piece.content


def _tail(path: Path) -> str:
    """Returns the last lines of a file that a container wrote; empty if the file cannot be read."""
    try:
        return _last_lines(read_tail(path, TAIL_BYTES).decode(errors="replace"))
    except OSError:
        return ""


def _last_lines(text: str) -> str:
    return "\n".join(text[-TAIL_BYTES:].rstrip().splitlines()[-TAIL_LINES:])


def _print(verdicts: Sequence[TaskVerdict], ran: dict[str, CheckedRun], *, as_json: bool) -> None:
    if as_json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "good": all(verdict.is_good for verdict in verdicts),
            "runs": {name: run.path for name, run in ran.items()},
            "tasks": [verdict.to_dict() for verdict in verdicts],
        }
        sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")
        return
    columns = {
        "task": [one_line(verdict.candidate.name) for verdict in verdicts],
        SOLUTION: [_rewards(verdict.solution) for verdict in verdicts],
        NOTHING: [_rewards(verdict.nothing) for verdict in verdicts],
        "verdict": [
            ", ".join(dict.fromkeys(one.fault.value.replace("_", " ") for one in verdict.problems)) or "good"
            for verdict in verdicts
        ],
    }
    write(sys.stdout, draw(make_table(columns, texts=("task", "verdict")), sys.stdout))
    for verdict in verdicts:
        for problem in verdict.problems:
            write(sys.stdout, f"{_told(verdict, problem)}\n\n")
    good = sum(verdict.is_good for verdict in verdicts)
    write(
        sys.stdout,
        f"The tests of {good} of {count_of(len(verdicts), 'task')} accept the solution and reject an agent "
        "that does nothing.\n",
    )
    attempts = [attempt for run in ran.values() for own in run.attempts.values() for attempt in own]
    if any(attempt.container_image == HOST_IMAGE for attempt in attempts):
        write(sys.stdout, "container=local ignores the FROM image. To check tasks in it, use --container docker.\n")
    if ran:
        write(sys.stdout, f"Recorded in {ran[SOLUTION].path} and {ran[NOTHING].path}\n")


def _rewards(rewards: Sequence[float | None]) -> str:
    """Formats the rewards of a task's attempts. Equal consecutive rewards are combined: `1.00 x4, 0.00 x2`."""
    shown = ["-" if reward is None else format_number(reward) for reward in rewards]
    together = [(one, len(list(same))) for one, same in groupby(shown)]
    return ", ".join(one if count == 1 else f"{one} x{count}" for one, count in together) or "-"


def _told(verdict: TaskVerdict, problem: Problem) -> str:
    """Formats a problem of a task for the terminal, with the outputs, and the files and episode to look at."""
    lines = [f"{verdict.candidate.name}: {problem.message.rstrip('.')}."]
    for what, text in problem.outputs.items():
        lines += [f"  {what}:", textwrap.indent(printable(text), "    | ", lambda _: True)] if text else [f"  {what}"]
    if problem.files is not None:
        lines.append(f"  files: {problem.files}")
    if problem.episode is not None:
        lines.append(f"  show:  ares-exp show {shlex.quote(str(problem.episode))}")
    return "\n".join(lines)
