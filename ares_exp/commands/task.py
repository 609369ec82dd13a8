"""The command `task`: creates a task from a template, checks a task's tests, or opens a shell in its container."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from pathlib import Path

from ares_exp.commands import task_check, task_shell
from ares_exp.commands.cli.run_command import CommandParser
from ares_exp.errors import ConfigError

HELP = """\
Creates a small task, checks that the tests of tasks work, and opens a shell in the container of a task.
[arguments]
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
[arguments]
Examples:
  %(prog)s tasks/my-task
  %(prog)s tasks/my-task --image python:3.12-slim
  %(prog)s my-env --for verifiers               a package for verifiers and prime-rl

Exit codes: 0 the task was created; 2 the command line is wrong, or the folder is not empty.
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


def add_arguments(parser: CommandParser) -> None:
    command = parser.add_command("new", _new, "create a small task to edit", NEW)
    command.add_argument(
        "folder", type=Path, metavar="PATH", help="folder of the task; its last part is the name of the task"
    )
    command.add_argument("--image", default=IMAGE, help="base image of the Dockerfile (%(default)s)")
    command.add_argument(
        "--for", choices=[VERIFIERS], dest="library", help="create a package for this library, with one task"
    )
    for name, module, about in (
        ("check", task_check, "check that tests accept the solution and reject an agent that does nothing"),
        ("shell", task_shell, "open a shell in the container of a task"),
    ):
        module.add_arguments(parser.add_command(name, module.run, about, module.HELP))


def _new(arguments: argparse.Namespace) -> None:
    folder = arguments.folder
    if arguments.library == VERIFIERS:
        task = make_package(folder, image=arguments.image)
        sys.stdout.write(
            f"{_next_steps(task)}\n{folder} is a package with this task:\n"
            f"Install it:            pip install -e {shlex.quote(str(folder))}\n"
            f"Evaluate a model:      vf-eval {folder.absolute().name} --env.agent.runtime.type subprocess --model ...\n"
        )
    else:
        make_task(folder, image=arguments.image)
        sys.stdout.write(_next_steps(folder))


def make_package(folder: Path, *, image: str = IMAGE) -> Path:
    """Creates a Python package with one task for the library `verifiers`, in a new or empty folder.

    Returns the folder of the task. Raises `ConfigError` if the folder or the image is not suitable.
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
    """Creates a task from the template in a new or empty folder, whose name becomes the name of the task.

    Raises `ConfigError` if the folder or the image is not suitable.
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


def _next_steps(folder: Path) -> str:
    shown = shlex.quote(str(folder))
    width = max(map(len, FILES))
    files = "\n".join(f"  {name:<{width}}  {about}" for name, about in FILES.items())
    return (
        f"{folder} is a complete task:\n{files}\n\n"
        f"Check its tests:       ares-exp task check {shown}\n"
        f"Run it with a model:   ares-exp env.path={shown} policy=openai policy.model=...\n"
    )
