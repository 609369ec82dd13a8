"""The command `task`: creates a small task, checks the tests of tasks, and opens a shell in a task."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path

from ares_exp.commands import task_shell
from ares_exp.commands.cli.run_command import EXIT_OK, CommandParser
from ares_exp.commands.task_runs import (
    NOTHING,
    SOLUTION,
    CheckedRun,
    check_containers,
    find_candidates,
    run_both,
    with_problems,
)
from ares_exp.commands.task_verdict import Problem, TaskVerdict, judge
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.schema import KEYS, validate
from ares_exp.errors import ConfigError
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import CHECKS
from ares_exp.records.results import HOST_IMAGE
from ares_exp.records.run_dir import fresh_dir
from ares_exp.records.terminal_text import count_of, draw, format_number, make_table, one_line, printable, write

DESCRIPTION = "Creates a small task, checks that the tests of tasks work, and opens a shell in the container of a task."
EPILOG = """\
Examples:
  %(prog)s new tasks/my-task
  %(prog)s check tasks/my-task
  %(prog)s shell tasks/my-task

`%(prog)s COMMAND --help` lists the options of each command.
"""
NEW = """\
Creates a small task in the Harbor format, in which the agent adds up the numbers in a file. Comments in its five files
explain them. You can run the task unchanged, or edit the files. With `--for verifiers`, creates a Python package with
this task, which verifiers loads as an environment.
"""
NEW_EXAMPLES = """\
Examples:
  %(prog)s tasks/my-task
  %(prog)s tasks/my-task --image python:3.12-slim
  %(prog)s my-env --for verifiers               a package for verifiers and prime-rl

Exit codes: 0 the task was created; 2 the command line is wrong, or the folder is not empty.
"""
CHECK = """\
Runs each task twice: with its own solution, which must pass, and with an agent that does nothing, which must not pass.
Both are ordinary runs with a run directory.
"""
CHECK_EXAMPLES = """\
Examples:
  %(prog)s tasks/my-task
  %(prog)s tasks --container docker concurrency=4
  %(prog)s tasks/my-task attempts=5           finds tests that pass only sometimes
  %(prog)s tasks --json | jq '.tasks[] | select(.good | not) | .name'

Exit codes: 0 all tasks are good; 1 a task is invalid, or its tests accept doing nothing or reject the solution; 2 the
command line is wrong, or tasks cannot be run here; 130 interrupted.
"""
TEMPLATE = Path(__file__).parent / "task_template"
FILES = {
    "instruction.md": "everything that the agent knows about the task",
    "task.toml": "time limits, resources, network",
    "environment/Dockerfile": "the container image in which the agent works",
    "tests/test.sh": "computes the reward when the agent is done",
    "solution/solve.sh": "the reference solution, which shows that the tests can be passed",
}
IMAGE = "debian:bookworm-slim"
VERIFIERS = "verifiers"
PYPROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
description = "Tasks of ares_exp as an environment of verifiers."
requires-python = ">=3.11"
dependencies = ["ares-exp", "verifiers>=0.4"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["{module}"]
"""
PLUGIN = '''\
"""An environment of verifiers: the tasks in the folder `tasks` of this package."""

from pathlib import Path

from ares_exp.training.verifiers import make_plugin

TASKS = Path(__file__).parent / "tasks"

# Add overrides as on the command line, such as `agent=tools`, `container=docker` or `concurrency=32`.
Tasks, Harness, Environment = make_plugin([f"env.path='{TASKS}'", "tracker=none"])
__all__ = ["Tasks", "Harness", "Environment"]
'''

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PACKAGE = re.compile(r"[a-z][a-z0-9_-]*")
_IMAGE = re.compile(r"[\w./:@-]+", re.ASCII)
SCHEMA_VERSION = 1
OURS = ("policy", "tracker.path", "resume", "replay", "branch_from", "hydra.run.dir", "hydra.sweep.dir", "env", "name")
TASKS_OF_ENV = ("path", "registry", "dataset", "git_url", "git_commit", "repo", "tasks", "exclude", "limit")


def add_arguments(parser: CommandParser) -> None:
    """Declares the arguments of the command."""
    command = parser.add_command("new", _new, about="create a small task to edit", description=NEW, epilog=NEW_EXAMPLES)
    command.add_argument(
        "folder", type=Path, metavar="PATH", help="folder of the task; its last part is the name of the task"
    )
    command.add_argument("--image", default=IMAGE, help="base image of the Dockerfile (%(default)s)")
    command.add_argument(
        "--for", choices=[VERIFIERS], dest="library", help="create a package for this library, with one task"
    )
    command = parser.add_command(
        "check",
        _check,
        about="check that tests accept the solution and reject an agent that does nothing",
        description=CHECK,
        epilog=CHECK_EXAMPLES,
    )
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
    command.add_argument("--config-dir", type=Path, metavar="DIR", help="folder with your own options, as for a run")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command = parser.add_command(
        "shell",
        task_shell.run,
        about="open a shell in the container of a task",
        description=task_shell.DESCRIPTION,
        epilog=task_shell.EPILOG,
    )
    task_shell.add_arguments(command)


def _new(arguments: argparse.Namespace) -> int:
    if arguments.library == VERIFIERS:
        task = make_package(arguments.folder, image=arguments.image)
        sys.stdout.write(_next_steps(task) + _package_steps(arguments.folder))
    else:
        make_task(arguments.folder, image=arguments.image)
        sys.stdout.write(_next_steps(arguments.folder))
    return EXIT_OK


def make_package(folder: Path, *, image: str = IMAGE) -> Path:
    """Creates a package for verifiers in a new or empty folder, and returns the folder of its task.

    Args:
        folder: Folder of the package; its last part is the name of the package.
        image: Base image of the task's Dockerfile.

    Raises:
        ConfigError: The folder is not empty or is a file, or the name of the package or image is invalid.
    """
    folder = folder.expanduser()
    name = folder.absolute().name
    if not _PACKAGE.fullmatch(name) or ".." in folder.parts:
        raise ConfigError(
            "Expected the last part of the folder to be a valid package name (lower-case letters, digits, `_`, `-`), "
            f"got {str(folder)!r:.200}."
        )
    _check_empty(folder)
    module = name.replace("-", "_")  # as verifiers imports it
    task = folder / module / "tasks" / "my-task"
    make_task(task, image=image)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name, module=module), encoding="utf-8")
    (folder / module / "__init__.py").write_text(PLUGIN, encoding="utf-8")
    return task


def make_task(folder: Path, *, image: str = IMAGE) -> None:
    """Creates a task in a new or empty folder.

    Args:
        folder: Folder of the task; its last part is the name of the task.
        image: Base image of the Dockerfile.

    Raises:
        ConfigError: The folder is not empty or is a file, or the name of the task or image is invalid.
    """
    folder = folder.expanduser()
    if not _NAME.fullmatch(folder.absolute().name) or ".." in folder.parts:
        raise ConfigError(
            f"Expected the last part of the folder to be a valid task name (letters, digits, `.`, `_`, `-`), got "
            f"{str(folder)!r:.200}."
        )
    if not _IMAGE.fullmatch(image):
        raise ConfigError(f"Expected `--image` to be the name of an image, got {image!r:.200}.")
    _check_empty(folder)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TEMPLATE / name, folder / name)
        (folder / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text(encoding="utf-8").replace(IMAGE, image), encoding="utf-8")


def _check_empty(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"The folder {folder} is not empty. Choose another folder.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a folder. Choose another folder.")


def _package_steps(folder: Path) -> str:
    return (
        f"\n{folder} is a package with this task:\n"
        f"Install it:            pip install -e {shlex.quote(str(folder))}\n"
        f"Evaluate a model:      vf-eval {folder.absolute().name} --env.agent.runtime.type subprocess --model ...\n"
    )


def _next_steps(folder: Path) -> str:
    shown = shlex.quote(str(folder))
    width = max(map(len, FILES))
    files = "\n".join(f"  {name:<{width}}  {about}" for name, about in FILES.items())
    return (
        f"{folder} is a complete task:\n{files}\n\n"
        f"Check its tests:       ares-exp task check {shown}\n"
        f"Run it with a model:   ares-exp env.path={shown} policy=openai policy.model=...\n"
    )


def _check(arguments: argparse.Namespace) -> int:
    paths, overrides = _taken_apart(arguments.arguments)
    if arguments.container is not None:
        overrides = [f"container={arguments.container}", *overrides]
    folders = [] if arguments.config_dir is None else [arguments.config_dir]
    config = compose_config(["env=harbor", "policy=oracle", "tracker=none", *overrides], config_dirs=folders)
    validate({name: config[name] for name in KEYS})
    candidates = with_problems(find_candidates(paths), config)
    runnable = [one for one in candidates if one.problem is None]
    ran: dict[str, CheckedRun] = {}
    if runnable:
        asyncio.run(check_containers(config))  # before the line that reports running tasks
        out = _place(arguments.out)
        flags = [f"--config-dir={folder}" for folder in folders]
        ran = run_both(runnable, out, overrides=overrides, flags=flags)
    verdicts = [judge(one, ran, threshold=config.reward_threshold) for one in candidates]
    _print(verdicts, ran, as_json=arguments.json)
    return exit_codes.COMPLETE if all(verdict.is_good for verdict in verdicts) else exit_codes.INCOMPLETE


def _taken_apart(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separates paths and overrides. An argument that exists as a file or folder is always a path."""
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
        "verdict": [_word(verdict) for verdict in verdicts],
    }
    write(sys.stdout, draw(make_table(columns, texts=("task", "verdict")), sys.stdout))
    for verdict in verdicts:
        for problem in verdict.problems:
            write(sys.stdout, f"{_told(verdict, problem)}\n\n")
    good = sum(verdict.is_good for verdict in verdicts)
    write(
        sys.stdout,
        f"The tests of {good} of {count_of(len(verdicts), 'task')} accept the solution and reject doing nothing.\n",
    )
    if any(result.container_image == HOST_IMAGE for run in ran.values() for result in run.results):
        write(sys.stdout, "FROM is ignored with container=local. Use --container docker to run the image.\n")
    if ran:
        write(sys.stdout, f"Recorded in {ran[SOLUTION].path} and {ran[NOTHING].path}\n")


def _rewards(rewards: Sequence[float | None]) -> str:
    """Formats the rewards of the attempts, with equal neighbours grouped: `1.00 x4, 0.00 x2`."""
    shown = ["-" if reward is None else format_number(reward) for reward in rewards]
    together = [(one, len(list(same))) for one, same in groupby(shown)]
    return ", ".join(one if count == 1 else f"{one} x{count}" for one, count in together) or "-"


def _word(verdict: TaskVerdict) -> str:
    faults = dict.fromkeys(problem.fault.value.replace("_", " ") for problem in verdict.problems)
    return ", ".join(faults) or "good"


def _told(verdict: TaskVerdict, problem: Problem) -> str:
    """Returns a paragraph with a problem of a task, the printed output, and the files to look at."""
    lines = [f"{verdict.candidate.name}: {problem.message.rstrip('.')}."]
    for what, text in problem.outputs.items():
        lines += [f"  {what}:", textwrap.indent(printable(text), "    | ", lambda _: True)] if text else [f"  {what}"]
    if problem.files is not None:
        lines.append(f"  files: {problem.files}")
    if problem.episode is not None:
        lines.append(f"  show:  ares-exp show {shlex.quote(str(problem.episode))}")
    return "\n".join(lines)
