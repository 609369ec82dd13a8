"""The command `task`: creates a task from a template, checks a task's tests, or opens a shell in its container."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ares_exp.cancellation import finish, in_thread
from ares_exp.commands import task_check
from ares_exp.commands.cli.run_command import CommandParser, add_config_dir
from ares_exp.config.overrides import quoted
from ares_exp.containers.container import Container, ContainerFactoryBase
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.containers.terminal import Terminal, TerminalContainer
from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.environments.source import EpisodeParts, make_source
from ares_exp.errors import ConfigError, EpisodeError, UserError
from ares_exp.records import exit_codes
from ares_exp.records.terminal_text import print_warning
from ares_exp.runs.components import composed_parts
from ares_exp.runs.resume.recorded_run import EpisodeRef
from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.snapshots.store import SnapshotStore
from ares_exp.tasks.harbor_task import HarborTask

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
SHELL = """\
Starts the container of a task, in the state in which the agent finds it, and opens an interactive shell in it. The
container is removed when the shell ends.
[arguments]
Examples:
  %(prog)s tasks/my-task
  %(prog)s tasks/my-task --solution --tests container=docker
  %(prog)s write-greeting                              a bundled task, by its name
  %(prog)s chess-best-move env=terminal_bench
  %(prog)s --episode outputs/my-run/my-task@3          the files after three steps of a recorded episode

Exit codes: 0 the shell has ended; 2 the command line is wrong, or the container cannot be started; 130 interrupted.
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

CHUNK_BYTES = 65_536
END_OF_INPUT = b"\x04"
END_OF_INPUT_SEC = 0.3
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def add_arguments(parser: CommandParser) -> None:
    command = parser.add_command("new", _new, "create a small task to edit", NEW)
    command.add_argument(
        "folder", type=Path, metavar="PATH", help="folder of the task; its last part is the name of the task"
    )
    command.add_argument("--image", default=IMAGE, help="base image of the Dockerfile (%(default)s)")
    command.add_argument(
        "--for", choices=[VERIFIERS], dest="library", help="create a package for this library, with one task"
    )
    command = parser.add_command(
        "check",
        task_check.run,
        "check that tests accept the solution and reject an agent that does nothing",
        task_check.HELP,
    )
    task_check.add_arguments(command)
    command = parser.add_command("shell", _shell, "open a shell in the container of a task", SHELL)
    command.add_argument(
        "arguments",
        nargs="*",
        metavar="TASK",
        help="the folder or the name of a task, and overrides (key=value) as for a run",
    )
    command.add_argument("--episode", metavar="RUN/TASK@STEP", help="restore the snapshot of a step of an episode")
    command.add_argument("--solution", action="store_true", help="copy the task's solution to /solution")
    command.add_argument("--tests", action="store_true", help="copy the task's tests to /tests")
    add_config_dir(command)


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


def _shell(arguments: argparse.Namespace) -> int:
    names = [one for one in arguments.arguments if "=" not in one or Path(one).exists()]
    overrides = [one for one in arguments.arguments if one not in names]
    if len(names) != (arguments.episode is None):
        wanted = "one task" if arguments.episode is None else "no task together with `--episode`"
        raise ConfigError(
            f"Expected {wanted}, got {', '.join(names) or 'none'}. Example: ares-exp task shell tasks/my-task."
        )
    try:
        asyncio.run(_open_shell(arguments, names, overrides))
    except EpisodeError as error:
        raise UserError(str(error)) from error
    except asyncio.CancelledError:
        return exit_codes.INTERRUPTED
    return exit_codes.COMPLETE


async def _open_shell(arguments: argparse.Namespace, names: Sequence[str], overrides: Sequence[str]) -> None:
    """Starts a task's container, or restores a snapshot, and connects stdin and stdout to a shell in the container."""
    _cancel_at_signals()
    restored = await asyncio.to_thread(_snapshot, arguments.episode) if arguments.episode is not None else None
    words = [f"env.path={quoted(one)}" if Path(one).is_dir() else f"env.tasks=[{quoted(one)}]" for one in names]
    words = ["policy=noop", "tracker=none", *words, *overrides]
    config, episode = await asyncio.to_thread(composed_parts, words, arguments.config_dir)
    if restored is not None:
        task, episode = await asyncio.to_thread(_recorded, restored, episode, overrides)
    else:
        task = await asyncio.to_thread(_task, make_source(config), names)
    if not episode.container_factory.has_terminals:
        raise ConfigError(
            f"container={episode.container_factory.name} has no terminals. Use container=local, container=docker or "
            "container=daytona."
        )
    await episode.container_factory.preflight()
    async with _started(task, episode, restored) as container:
        stage = task.stages[0]
        if arguments.solution:
            await stage.upload_solution(container)
        if arguments.tests:
            await stage.upload_tests(container)
        assert isinstance(container, TerminalContainer)
        columns, lines = shutil.get_terminal_size()
        terminal = await container.open_terminal(columns=columns, lines=lines, user=stage.agent_user)
        try:
            with _raw_input():
                await _connect(terminal)
        finally:
            await finish(terminal.close())


def _cancel_at_signals() -> None:
    """Makes termination signals, such as SIGTERM, cancel the current asyncio task, so that it removes the container."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in SIGNALS:
        loop.add_signal_handler(number, task.cancel)


def _task(source: object, names: Sequence[str]) -> HarborTask:
    """Loads the task that the arguments select. Blocks. Raises `ConfigError` if they do not select exactly one task."""
    if not isinstance(source, HarborEnvironments):
        raise ConfigError("The tasks of this `env` have no container. Use env=harbor, or another env of Harbor tasks.")
    found = source.load(print_warning)
    if len(found) != 1:
        raise ConfigError(
            f"Expected the folder or the name of one task, but {names[0]} contains {len(found)}: "
            f"{', '.join(found[:5])}{', …' if len(found) > 5 else ''}."
        )
    return source.tasks[0]


def _snapshot(reference: str) -> EnvironmentSnapshot:
    """Returns the snapshot for a reference `RUN/EPISODE@STEP`. Blocks. Raises `ConfigError` if it does not exist."""
    found = EpisodeRef.parse(reference)
    if found.episode is None or found.step is None:
        raise ConfigError(f"Expected `--episode <run>/<episode>@<step>`, got {reference!r:.200}.")
    store, name = SnapshotStore(found.run.path / "snapshots"), f"{found.episode.episode_id}@{found.step}"
    if name not in store.ids():
        prefix = f"{found.episode.episode_id}@"
        steps = sorted(int(one.removeprefix(prefix)) for one in store.ids() if one.startswith(prefix))
        there = f"it has snapshots of steps {', '.join(map(str, steps))}" if steps else "it has no snapshots"
        raise ConfigError(
            f"Episode {found.episode.episode_id} has no snapshot of step {found.step}: {there}. To get a snapshot of "
            "each step, run the task with `snapshot=every_step`."
        )
    return store.get(name)


def _recorded(
    snapshot: EnvironmentSnapshot, episode: EpisodeParts, overrides: Sequence[str]
) -> tuple[HarborTask, EpisodeParts]:
    """Returns a snapshot's task, and a copy of `episode` that uses the container backend recorded in the snapshot.

    If an override sets `container=…`, the copy keeps the backend of `episode`.
    """
    from ares_exp.environments.restoring import recorded_container_factory, recorded_task

    containers: ContainerFactoryBase = episode.container_factory
    if not any(one.startswith("container=") for one in overrides):
        containers = recorded_container_factory(snapshot)
    task = recorded_task(snapshot)
    assert isinstance(task, HarborTask)
    return task, replace(episode, container_factory=containers)


@asynccontextmanager
async def _started(
    task: HarborTask, episode: EpisodeParts, restored: EnvironmentSnapshot | None
) -> AsyncIterator[Container]:
    """Yields a task's container, prepared for the first stage or restored from a snapshot. Removes it at the end."""
    spec, stage = episode.limits.time.container_spec(task), task.stages[0]
    if restored is not None:
        objects = restored.object_store
        delta = await asyncio.to_thread(lambda: get_delta(objects, restored.filesystem))
        spec = replace(spec, changes=StoredChanges(delta, objects))
    episode.check_containers(task)
    container = episode.container_factory(spec)
    try:
        await container.start()
        if restored is None:
            await task.set_up(container)
            await stage.start(container)
        await container.set_network(stage.agent_network)
        yield container
    finally:
        await finish(container.stop())


@contextmanager
def _raw_input() -> Iterator[None]:
    """Sets the user's terminal to raw mode, so that all keys, including Ctrl-C, reach the shell in the container.

    At the end, restores the previous mode. Does nothing if standard input is not a terminal.
    """
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def _connect(terminal: Terminal) -> None:
    """Connects standard input and output to the container's terminal, until the shell in it ends."""
    typing = asyncio.create_task(_type(terminal))
    try:
        with suppress(OSError):
            while output := await terminal.read():
                await in_thread(partial(_write, output))
    finally:
        typing.cancel()
        await asyncio.wait({typing})


async def _type(terminal: Terminal) -> None:
    """Sends standard input to the container's terminal. At the end of the input, sends Ctrl-D until the shell ends."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    with suppress(OSError):
        while data := await _readable(loop, descriptor):
            await terminal.write(data)
        while True:  # a busy shell can miss the first Ctrl-D
            await terminal.write(END_OF_INPUT)
            await asyncio.sleep(END_OF_INPUT_SEC)


async def _readable(loop: asyncio.AbstractEventLoop, descriptor: int) -> bytes:
    """Waits for standard input and reads the available bytes."""
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except OSError:  # a regular file is always readable
        return os.read(descriptor, CHUNK_BYTES)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
    return os.read(descriptor, CHUNK_BYTES)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
