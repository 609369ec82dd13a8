"""The command `task shell`: opens an interactive shell in a task's container, as it is when an agent starts in it."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.agents.code_agent import as_agent_factory
from ares_exp.cancellation import finish, in_thread
from ares_exp.commands.cli.run_command import CommandParser, add_config_dir
from ares_exp.config.overrides import quoted
from ares_exp.config.schema import KEYS, validate
from ares_exp.config.targets import instantiate_group
from ares_exp.containers.container import Container, ContainerFactoryBase, as_container_factory
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.containers.terminal import Terminal, TerminalContainer
from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.environments.source import EpisodeParts, make_source
from ares_exp.errors import ConfigError, EpisodeError, UserError
from ares_exp.records import exit_codes
from ares_exp.records.terminal_text import print_warning
from ares_exp.runs.components import Settings
from ares_exp.runs.resume.recorded_run import EpisodeRef
from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.snapshots.store import SnapshotStore
from ares_exp.tasks.harbor_task import HarborTask

if TYPE_CHECKING:
    from omegaconf import DictConfig

HELP = """\
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
CHUNK_BYTES = 65_536
END_OF_INPUT = b"\x04"
END_OF_INPUT_SEC = 0.3
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def add_arguments(command: CommandParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
    names = [one for one in arguments.arguments if "=" not in one or Path(one).exists()]
    overrides = [one for one in arguments.arguments if one not in names]
    if len(names) != (arguments.episode is None):
        wanted = "one task" if arguments.episode is None else "no task together with `--episode`"
        raise ConfigError(
            f"Expected {wanted}, got {', '.join(names) or 'none'}. Example: ares-exp task shell tasks/my-task."
        )
    try:
        asyncio.run(_shell(arguments, names, overrides))
    except EpisodeError as error:
        raise UserError(str(error)) from error
    except asyncio.CancelledError:
        return exit_codes.INTERRUPTED
    return exit_codes.COMPLETE


async def _shell(arguments: argparse.Namespace, names: Sequence[str], overrides: Sequence[str]) -> None:
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


def composed_parts(overrides: Sequence[str], config_dirs: Sequence[Path]) -> tuple[DictConfig, EpisodeParts]:
    """Composes a config, and creates the parts of episodes from it. Raises `ConfigError` if the config is invalid."""
    from ares_exp.config.hydra_setup import compose_config  # loads Hydra, which is slow

    config = compose_config(overrides, config_dirs=config_dirs)
    values = {name: config[name] for name in KEYS}
    validate(values)
    settings = Settings.of(values)
    containers = as_container_factory(instantiate_group(config, "container"))
    agents = as_agent_factory(instantiate_group(config, "agent"))
    return config, EpisodeParts(containers, agents, settings.limits, seed=settings.seed)


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
