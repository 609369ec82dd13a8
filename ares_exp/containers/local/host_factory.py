"""`container=host`: commands run directly on this machine, on its real files, without isolation.

This backend is for machines that allow no namespaces. The paths that a task writes to must not exist before, or must be
empty directories. They are recorded in a file (`guardian.MADE`) before the task's files are written. After the episode,
the guardian or this process removes them. If both were killed, the next run or `ares-exp clean` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import posixpath
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from ares_exp.cancellation import in_thread
from ares_exp.containers.container import ContainerFactoryBase, ContainerSpec, Shell
from ares_exp.containers.filesystem.delta import Delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.images.dockerfile_steps import CopyStep, Dockerfile, MakeDirectoryStep, find_sources
from ares_exp.containers.local.container import LocalContainer, read_task_dockerfile
from ares_exp.containers.local.container_directory import ContainerDirectory, remove_stale
from ares_exp.containers.local.container_files import SEARCH_PATH
from ares_exp.containers.local.container_process import ContainerProcess, Launch
from ares_exp.containers.local.guardian import MADE
from ares_exp.containers.local.isolation import WAYS_OUT, container_evidence, container_note
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC
from ares_exp.containers.ownership import locked
from ares_exp.errors import (
    ConfigError,
    ContainerError,
    ContainerStartError,
    PreflightError,
    SnapshotUnsupportedError,
    TransferError,
    UnsupportedTaskError,
)


class MachinePaths:
    """The paths that one container creates on this machine, recorded in a file for their removal. All methods block."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / MADE
        self._file.touch()
        self._known: set[str] = set()
        self._unsettled: set[str] = set()
        self._lock = threading.Lock()

    def claim(self, path: str) -> None:
        """Records a directory to which the task's files will be written. `settle` creates it if it is still missing.

        Raises `ContainerStartError` if the path exists and is not an empty directory.
        """
        if is_occupied(path):
            raise ContainerStartError(f"{_occupied(path)}.")
        with self._lock:
            if Path(path).is_dir():
                self._write(path, is_kept=True)
            elif not self._covers(top := _first_missing(path)):
                self._unsettled.add(top)
                self._write(top, is_kept=False)

    def settle(self) -> None:
        """Creates claimed directories that are still missing. Records the inodes of all of them for `remove_made`."""
        with self._lock:
            for path in sorted(self._unsettled):
                if not os.path.lexists(path):
                    Path(path).mkdir()
                self._write(path, is_kept=False)
            self._unsettled.clear()

    def make_room(self, source: Path, target: str) -> list[str]:
        """Records the paths that an upload will create, and creates the first missing part of each path.

        Returns the created parts that are files. The upload replaces them, so the caller must then call `renew`. Raises
        `TransferError` if a directory above `target` cannot be created.
        """
        try:
            with self._lock:
                needed = [(target, source.is_dir()), *_contents(source, target)]
                return [path for path, is_directory in needed if self._create_first_missing(path, is_directory)]
        except OSError as error:
            raise TransferError(f"Cannot copy {source} to {target} on this machine: {error}.") from error

    def renew(self, files: Iterable[str]) -> None:
        """Records the new inodes of files that an upload has replaced."""
        with self._lock, contextlib.suppress(FileNotFoundError):  # the container was stopped during the upload
            for path in files:
                self._write(path, is_kept=False)

    def _create_first_missing(self, path: str, is_directory: bool) -> bool:
        """Creates and records the first missing part of a path (`/a` of `/a/b`). Returns whether it is a file."""
        if os.path.lexists(path):
            return False
        top = _first_missing(path)
        if self._covers(top) and top not in self._unsettled:
            return False
        is_file = top == path and not is_directory
        if is_file:
            Path(top).touch()
        else:
            Path(top).mkdir()
        self._unsettled.discard(top)
        self._write(top, is_kept=False)
        return is_file

    def _covers(self, path: str) -> bool:
        return any(str(one) in self._known for one in (Path(path), *Path(path).parents))

    def _write(self, path: str, *, is_kept: bool) -> None:
        self._known.add(path)
        try:
            found = os.lstat(path)
            inode = [found.st_dev, found.st_ino]
        except FileNotFoundError:
            inode = None
        with self._file.open("a") as file:
            file.write(json.dumps({"path": path, "is_kept": is_kept, "id": inode}) + "\n")


def check_paths(spec: ContainerSpec, dockerfile: Dockerfile | None) -> None:
    """Raises `UnsupportedTaskError` if a task would write to files or directories that exist on this machine."""
    found = [_occupied(path) for path in task_directories(spec, dockerfile) if is_occupied(path)]
    if dockerfile is not None and spec.context_dir is not None:
        for step in dockerfile.steps:
            if isinstance(step, CopyStep):
                found += [f"{path} exists" for path in _replaced(step, spec.context_dir)]
                found += [
                    f"its Dockerfile copies files to {one}"
                    for one in spec.directories
                    if Path(step.target).is_relative_to(one)
                ]
    if found:
        raise UnsupportedTaskError(
            f"{spec.name}: container=host uses the paths of this machine, but {'; '.join(dict.fromkeys(found))}. "
            "Move existing files away, or use container=docker."
        )


def task_directories(spec: ContainerSpec, dockerfile: Dockerfile | None) -> list[str]:
    """Returns the directories that a task writes to: from its Dockerfile, its `spec.directories` and its mounts."""
    steps = dockerfile.steps if dockerfile is not None else ()
    made = [step.path.rstrip("/") for step in steps if isinstance(step, MakeDirectoryStep)]
    return [path for path in dict.fromkeys((*made, *spec.directories, *(one.target for one in spec.mounts))) if path]


def is_occupied(path: str) -> bool:
    """Returns whether a path exists and is not an empty directory."""
    return os.path.lexists(path) and (not stat.S_ISDIR(os.lstat(path).st_mode) or any(Path(path).iterdir()))


def _first_missing(path: str) -> str:
    missing = Path(path)
    while not os.path.lexists(missing.parent):
        missing = missing.parent
    return str(missing)


def _occupied(path: str) -> str:
    return f"{path} exists and is not an empty directory"


def _replaced(step: CopyStep, context: Path) -> Iterator[str]:
    into = step.target.endswith("/") or Path(step.target).is_dir()
    for source in find_sources(step, context):
        if source.is_dir():
            targets = _contents(source, step.target)
        else:
            targets = iter([(posixpath.join(step.target, source.name) if into else step.target, False)])
        for target, is_directory in targets:
            if os.path.lexists(target) and not (is_directory and _is_directory(Path(target))):
                yield target


def _contents(source: Path, target: str) -> Iterator[tuple[str, bool]]:
    """Yields the paths that a copy of the directory `source` has below `target`, and whether each is a directory."""
    for path in sorted(source.rglob("*")):
        yield posixpath.join(target, path.relative_to(source)), _is_directory(path)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


_PROBE = ContainerSpec(name="probe", start_timeout_sec=30.0)

WAYS_OUT_ELSEWHERE = "Run as root, or use container=local or container=docker."
NO_SNAPSHOTS = (
    "container=host uses this machine's own files, which cannot be captured. Set `snapshot=none`, or use "
    "container=docker."
)
_LOCK_SEC = 10.0
_LOOK_EVERY_SEC = 0.05


class HostContainerFactory(ContainerFactoryBase):
    """Runs commands directly on this machine, as root, one episode at a time. Nothing is isolated.

    `LocalContainerFactory.find_leftovers` also lists the leftovers of this factory.
    """

    name = "host"
    has_terminals = True
    forwards_ports = True
    harmless_options = frozenset({"shell"})
    is_isolated = False
    max_containers = 1

    @pydantic.validate_call
    def __init__(self, *, shell: Shell = "bash -c") -> None:
        """Validates the options.

        Args:
            shell: Shell of commands. `bash -c` and `sh -c` keep the environment variables of the task's Dockerfile.
                `bash -lc` first reads `/etc/profile`, which resets `PATH` on Debian.
        """
        self._shell: Shell = shell

    def __call__(self, spec: ContainerSpec) -> HostContainer:
        return HostContainer(spec, shell=self._shell)

    @property
    def options(self) -> dict[str, Any]:
        return {"shell": self._shell}

    async def preflight(self) -> None:
        """Checks that commands can run as root on this machine, and removes leftovers of killed runs.

        Raises `PreflightError` if this user is not root, or if an episode of another run is using the machine.
        """
        if sys.platform != "linux":
            raise PreflightError(f"container=host needs Linux, but this is {sys.platform}. Use container=docker.")
        if os.geteuid() != 0:
            raise PreflightError(
                "container=host needs root, because tasks use paths such as /app and /tests, and this process runs as "
                f"user {os.geteuid()}.{container_note()} {WAYS_OUT if container_evidence() else WAYS_OUT_ELSEWHERE}"
            )
        await asyncio.to_thread(remove_stale)
        try:
            async with self(_PROBE) as container:
                await container.exec("true", timeout_sec=30.0)
        except ContainerError as error:
            raise PreflightError(f"container=host cannot run commands on this machine: {error}") from error

    def check_snapshots(self) -> None:
        """Rejects snapshots, because the files on this machine cannot be captured."""
        raise ConfigError(NO_SNAPSHOTS)

    def check(self, spec: ContainerSpec) -> list[str]:
        """Checks that this machine can run `spec`. Returns warnings about limits and network policies that are ignored.

        Raises:
            UnsupportedTaskError: The task needs an image, a compose file, GPUs, an unsupported Dockerfile instruction,
                an allowlist, different networks in its phases, or paths that already exist on this machine.
            TaskError: The Dockerfile is missing or malformed.
        """
        if spec.networks not in ({PUBLIC}, {NO_NETWORK}):
            raise UnsupportedTaskError(
                f"{spec.name}: with container=host, every phase has the network of this machine, but the task "
                "needs an allowlist or different networks per phase. Use container=docker."
            )
        check_paths(spec, read_task_dockerfile(spec, backend=self.name))
        limits = {"cpus": spec.cpus, "memory_mb": spec.memory_mb, "storage_mb": spec.storage_mb}
        warnings = [f"{name}={value:g}: not enforced by container=host" for name, value in limits.items() if value]
        if spec.networks == {NO_NETWORK}:
            warnings.append("network: not disabled by container=host, although the task requires no network")
        return warnings


class HostContainer(LocalContainer):
    """This machine in the role of a container. Only one such container can run at a time."""

    _backend: ClassVar[str] = "host"

    def __init__(self, spec: ContainerSpec, *, shell: Shell = "bash -c") -> None:
        super().__init__(spec, share_network=True, build_network=True, shell=shell)
        self._privileged = True  # as root without namespaces, it needs no capability to run commands as any user
        self._paths: MachinePaths | None = None

    async def _start(self) -> None:
        if self._spec.changes is not None:
            raise SnapshotUnsupportedError(NO_SNAPSHOTS)
        dockerfile, env = self._read_task()
        spec = self._spec
        if shutil.which("python3", path=SEARCH_PATH) is None:
            env["PATH"] += f":{sys.base_prefix}/bin"
        async with _machine_lock() as lock:
            self._directory = directory = ContainerDirectory(Path(tempfile.gettempdir()))
            self._paths = paths = MachinePaths(directory.path)
            (directory.path / "channels").mkdir()
            for path in task_directories(spec, dockerfile):
                await in_thread(functools.partial(paths.claim, path))
            self._process = await ContainerProcess.launch(Launch(directory.path, is_guarded=True, env=env, held=lock))
        for mount in spec.mounts:
            await in_thread(
                functools.partial(shutil.copytree, mount.source, mount.target, symlinks=True, dirs_exist_ok=True)
            )
        if dockerfile is not None and spec.context_dir is not None:
            await self._build(dockerfile, spec.context_dir, directory.path / "context", with_network=True)
        await in_thread(paths.settle)

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        raise SnapshotUnsupportedError(NO_SNAPSHOTS)

    async def upload(self, source: str | Path, target: str | Path) -> None:
        paths, path = self._paths, self._absolute(target)
        if paths is None or not Path(source).exists():
            await super().upload(source, target)
            return
        files = await in_thread(lambda: paths.make_room(Path(source), path))
        await super().upload(source, target)
        await in_thread(lambda: paths.renew(files))


@asynccontextmanager
async def _machine_lock() -> AsyncIterator[int]:
    """Locks `/`, so that one episode runs at a time. Yields the lock's descriptor, which the guardian inherits."""
    with contextlib.ExitStack() as held:
        try:
            async with asyncio.timeout(_LOCK_SEC):
                while True:
                    with contextlib.suppress(BlockingIOError):
                        descriptor = held.enter_context(locked(Path("/"), os.O_RDONLY | os.O_DIRECTORY))
                        break
                    await asyncio.sleep(_LOOK_EVERY_SEC)
        except TimeoutError as error:
            raise ContainerStartError(
                "Another episode is running on this machine with container=host, and only one can run at a "
                "time. Wait until it ends, or use container=docker."
            ) from error
        yield descriptor
