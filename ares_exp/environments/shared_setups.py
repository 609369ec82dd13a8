"""Set-ups shared by attempts: what a task's set-up changed in a container, given to the containers of other attempts.

The first attempt at a task sets its container up as any does, and leaves the changed files in a directory; later ones
start with these files, as a restored snapshot does. Attempts of other processes of this user wait for that directory,
too, and the last process that uses it removes it. A set-up that leaves more than files is not shared.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from ares_exp import __version__
from ares_exp.cancellation import finish
from ares_exp.containers.container import Container, ContainerFactoryBase, ContainerSpec, SnapshottableContainer
from ares_exp.containers.shared_directory import SharedDirectory
from ares_exp.environments.left_processes import left_processes
from ares_exp.errors import ConfigError, SnapshotError, UserError
from ares_exp.filesystem.delta import StoredChanges
from ares_exp.filesystem.delta_encoding import get_delta, put_delta
from ares_exp.filesystem.objects import ObjectStore
from ares_exp.filesystem.shared_start import SharedStart
from ares_exp.tasks.task import Task

CAPTURE_SEC = 600.0
"""Bound on the capture of a set-up; it is not shared then."""
_LOOK_EVERY_SEC = 0.1
_LIST = "changes.json"

# Says, a line each, what is in the container besides files, or that this cannot be told.
_NOT_FILES = """
[ -z "$(ls -A /dev/shm 2>/dev/null)" ] || echo "there are files in /dev/shm"
command -v grep tr >/dev/null || echo "there is no grep in the image, by which processes are found"
"""

_logger = logging.getLogger(__name__)


@runtime_checkable
class SharingTask(Protocol):
    """A `Task` whose attempts may share its set-up."""

    @property
    def why_setup_is_not_shared(self) -> str | None:
        """Why attempts must not start from what one set-up left, as the end of a sentence; `None`: they may."""
        ...


def why_not_shared(task: Task) -> str | None:
    """Returns why the set-up of a task is not shared, before anything starts; `None` if it may be."""
    if not isinstance(task, SharingTask):
        return f"tasks of the kind {type(task).__name__} do not say that it may be"
    if task.container_spec.compose_file is not None:
        return "its compose file starts several containers"
    return task.why_setup_is_not_shared


def check_sharing(factory: ContainerFactoryBase, tasks: Iterable[Task]) -> list[str]:
    """Checks, before anything starts, that set-ups can be shared.

    Returns:
        Warnings: the tasks whose set-up is repeated for each attempt, with the reason.

    Raises:
        ConfigError: The backend, or its options, do not allow it.
    """
    remedy = "Set env.share_setup=false, or use container=local or container=docker."
    if factory.sharing_key is None:
        raise ConfigError(
            f"Expected a backend whose containers can start with the files of others, as env.share_setup=true needs "
            f"it, got container={factory.name}. {remedy}"
        )
    try:
        factory.check_snapshots()
    except UserError as error:
        raise ConfigError(f"env.share_setup=true captures containers' files. {error} {remedy}") from None
    reasons = ((task.name, why_not_shared(task)) for task in tasks)
    return [f"{name}: its set-up is not shared, because {why}" for name, why in reasons if why is not None]


class SharedSetups:
    """The set-ups that the environments of a run share. Made without I/O; `close` releases them."""

    def __init__(self) -> None:

        self._found: dict[str, tuple[SharedDirectory, StoredChanges]] = {}
        self._unshared: set[str] = set()
        self._turns: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Lock] = {}
        self._is_closed = False

    async def look_up(
        self, task: Task, spec: ContainerSpec, factory: ContainerFactoryBase
    ) -> StoredChanges | Filling | None:
        """Finds what the set-up of a task left; waits while another attempt sets up.

        Args:
            task: The task.
            spec: Its container, as it is made.
            factory: Makes the container.

        Returns:
            The files to start with; a `Filling`, if this attempt is to set up, and others wait for what it leaves;
            `None` if it is to set up for itself.
        """
        if why_not_shared(task) is not None or factory.sharing_key is None:
            return None
        key = await asyncio.to_thread(_key, task, spec, factory)
        turn = self._turns.setdefault((asyncio.get_running_loop(), key), asyncio.Lock())
        if key in self._found or key in self._unshared:
            return self._known(key)
        await turn.acquire()
        try:
            if key in self._found or key in self._unshared or self._is_closed:
                return self._known(key)
            directory = await _held(key, within=_set_up_sec(task, spec))
            if directory is not None and not directory.is_full:
                filling = Filling(self, key, task.name, directory, turn)
                turn = None  # type: ignore[assignment]  # its own now
                return filling
            if directory is not None:
                await self._take(key, task.name, directory)
            else:
                self.leave(key, task.name, "another process did not finish it in time")
        except OSError as error:
            self.leave(key, task.name, f"its directory cannot be made: {error}")
        finally:
            if turn is not None:
                turn.release()
        return self._known(key)

    def _known(self, key: str) -> StoredChanges | None:
        found = self._found.get(key)
        return found[1] if found is not None and key not in self._unshared else None

    async def _take(self, key: str, task_name: str, directory: SharedDirectory) -> None:
        """Reads what another process left."""
        try:
            changes = await asyncio.to_thread(_read, directory.path)
            if key not in self._found:  # another event loop of this process took it meanwhile
                self._found[key] = (directory, changes)
                return
        except (SnapshotError, ValueError) as error:
            self.leave(key, task_name, f"it cannot be read: {error}")
        finally:
            if self._found.get(key, (None,))[0] is not directory:
                await finish(asyncio.to_thread(directory.release))

    def has(self, key: str) -> bool:
        """Returns whether there is what a set-up left."""
        return key in self._found

    def share(self, key: str, directory: SharedDirectory, changes: StoredChanges) -> None:
        """Notes what a set-up left."""
        self._found[key] = (directory, changes)

    def leave(self, key: str, task_name: str, why: str) -> None:
        """Notes that attempts at a task set up for themselves from now on."""
        self._unshared.add(key)
        _logger.warning("The set-up of %s is not shared: %s.", task_name, why.rstrip("."))

    def leave_changes(self, changes: StoredChanges, task_name: str, why: str) -> None:
        """Notes that no container can start with these files."""
        for key, (_, found) in self._found.items():
            if found is changes and key not in self._unshared:
                self.leave(key, task_name, why)

    async def close(self) -> None:
        """Releases the files; those that no other process uses are removed. Idempotent."""
        self._is_closed = True
        found, self._found = self._found, {}
        for directory, changes in found.values():
            if changes.shared is not None:
                await finish(changes.shared.close())
            await finish(asyncio.to_thread(directory.release))


class Filling:
    """One attempt's turn to set up, during which others wait. `keep` the container in its body."""

    def __init__(
        self, setups: SharedSetups, key: str, task_name: str, directory: SharedDirectory, turn: asyncio.Lock
    ) -> None:

        self._setups = setups
        self._key = key
        self._task_name = task_name
        self._directory = directory
        self._turn = turn

    async def __aenter__(self) -> Self:
        return self

    async def keep(self, container: Container) -> None:
        """Leaves the changed files of a container that has been set up, if it has changed nothing but files.

        Raises:
            ContainerError: The container failed.
        """
        try:
            async with asyncio.timeout(CAPTURE_SEC):
                why = await self._captured(container)
        except (SnapshotError, OSError) as error:  # TimeoutError included
            why = str(error) or f"capturing it took more than {CAPTURE_SEC:g} s"
        if why is not None:
            self._setups.leave(self._key, self._task_name, why)

    async def _captured(self, container: Container) -> str | None:
        """Captures the files; returns why they are not shared, or `None`."""
        if not isinstance(container, SnapshottableContainer):
            return "its container cannot be captured"
        if processes := await left_processes(container):
            return f"it left a process running: {processes[0]}"
        others = await container.exec(_NOT_FILES, cwd="/", user="root", timeout_sec=10.0, shell="sh -c")
        if others.exit_code != 0 or others.output.strip():
            return ", ".join(others.output.split("\n")).strip(", ") or "its container does not tell what runs in it"
        objects = ObjectStore(self._directory.path)
        delta = await container.capture_changes(objects)
        if delta.notes:
            return delta.notes[0]

        def write() -> None:
            (self._directory.path / _LIST).write_text(json.dumps(put_delta(delta, objects)))
            self._directory.share()

        await asyncio.to_thread(write)
        self._setups.share(self._key, self._directory, StoredChanges(delta, objects, SharedStart()))
        return None

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Lets the others go on: with what was kept or, after a failure, with set-ups of their own."""
        try:
            if isinstance(exc, Exception):
                self._setups.leave(self._key, self._task_name, "it failed")
            if not self._setups.has(self._key):
                await finish(asyncio.to_thread(self._directory.release))
        finally:
            self._turn.release()


async def _held(key: str, *, within: float) -> SharedDirectory | None:
    """Holds the directory of a key; `None` if another process fills it for longer than that."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within
    while True:
        held = SharedDirectory.held(key)
        if held is not None or loop.time() >= until:
            return held
        await asyncio.sleep(_LOOK_EVERY_SEC)  # a lock of the kernel tells nobody that it is free


def _set_up_sec(task: Task, spec: ContainerSpec) -> float:
    return spec.start_timeout_sec + task.set_up_timeout_sec + task.stages[0].begin_timeout_sec + CAPTURE_SEC


def _key(task: Task, spec: ContainerSpec, factory: ContainerFactoryBase) -> str:
    """Returns the digest of everything that a set-up depends on. Blocking."""
    known = {"ares_exp": __version__, "backend": factory.name, "options": factory.sharing_key}
    text = json.dumps({**known, "task": task.describe(), "container": spec}, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _plain(value: object) -> object:
    """Returns what JSON can hold, in an order that is the same in every process."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, frozenset | set):
        return sorted(json.dumps(one, sort_keys=True, default=_plain) for one in value)
    return str(value)


def _read(path: Path) -> StoredChanges:
    """Reads what a set-up left. Blocking.

    Raises:
        SnapshotError, ValueError: It is not what was written.
    """
    objects = ObjectStore(path)
    return StoredChanges(get_delta(objects, json.loads((path / _LIST).read_text())), objects, SharedStart())
