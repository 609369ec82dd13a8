"""The container of `container=host`: commands run directly on this machine, in the real paths, without isolation."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from ares_exp.cancellation import in_thread
from ares_exp.containers.container import ContainerSpec, Shell, User
from ares_exp.containers.dockerfile.reading import Dockerfile
from ares_exp.containers.local.container import LocalContainer
from ares_exp.containers.local.container_directory import ContainerDirectory
from ares_exp.containers.local.container_process import ContainerProcess, Launch
from ares_exp.containers.local.host_root import SEARCH_PATH
from ares_exp.containers.local.machine_paths import MachinePaths, task_directories
from ares_exp.errors import ContainerStartError, SnapshotUnsupportedError
from ares_exp.filesystem.delta import Delta
from ares_exp.filesystem.objects import ObjectStore

NO_SNAPSHOTS = (
    "container=host works in this machine's own files, which cannot be captured. Set `snapshot=none`, or use "
    "container=docker."
)

_LOCK_SEC = 10.0
_LOOK_EVERY_SEC = 0.05


class HostContainer(LocalContainer):
    """This machine as a container. Only one can be started at a time."""

    _backend: ClassVar[str] = "host"

    def __init__(self, spec: ContainerSpec, *, shell: Shell = "bash -c") -> None:
        """Starts nothing yet.

        Args:
            spec: The task's container.
            shell: The default shell of commands.
        """
        super().__init__(spec, share_network=True, build_network=True, shell=shell)
        self._paths: MachinePaths | None = None

    async def _start(self) -> None:
        if self._spec.changes is not None:
            raise SnapshotUnsupportedError(NO_SNAPSHOTS)
        dockerfile, env = self._read_task()
        spec = self._spec
        if shutil.which("python3", path=SEARCH_PATH) is None:
            env["PATH"] += f":{sys.base_prefix}/bin"
        try:
            async with _machine_lock() as lock:
                self._directory = directory = ContainerDirectory(Path(tempfile.gettempdir()))
                self._paths = paths = MachinePaths(directory.path)
                (directory.path / "channels").mkdir()
                await in_thread(lambda: self._claim(paths, dockerfile))
                self._process = await ContainerProcess.launch(
                    Launch(directory.path, is_guarded=True, env=env, held=lock)
                )
            await in_thread(self._copy_mounts)
            if dockerfile is not None and spec.context_dir is not None:
                await self._build(dockerfile, spec.context_dir, directory.path / "context", with_network=True)
            await in_thread(paths.settle)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise ContainerStartError(f"{spec.name} did not start on this machine: {error}.") from error
        self._open_channels()

    def _claim(self, paths: MachinePaths, dockerfile: Dockerfile | None) -> None:
        for path in task_directories(self._spec, dockerfile):
            paths.claim(path)

    def _copy_mounts(self) -> None:
        for mount in self._spec.mounts:
            shutil.copytree(mount.source, mount.target, symlinks=True, dirs_exist_ok=True)

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        """Rejects snapshots: the files of this machine cannot be captured.

        Raises:
            SnapshotUnsupportedError: Rejects every call.
        """
        raise SnapshotUnsupportedError(NO_SNAPSHOTS)

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Copies, and records the paths that the copy creates."""
        paths, path = self._paths, self._absolute(target)
        if paths is None or not Path(source).exists():
            await super().upload(source, target)
            return
        files = await in_thread(lambda: paths.make_room(Path(source), path))
        await super().upload(source, target)
        await in_thread(lambda: paths.renew(files))

    def _known_user(self, user: User | None) -> User:
        return self._user if user is None else user


@asynccontextmanager
async def _machine_lock() -> AsyncIterator[int]:
    """Locks this machine's root directory; yields the descriptor. The guardian keeps the lock until it ends.

    Raises:
        ContainerStartError: Another container of this kind is running.
    """
    descriptor = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            async with asyncio.timeout(_LOCK_SEC):
                while not _is_locked_by(descriptor):  # noqa: ASYNC110 (the kernel has no event for it)
                    await asyncio.sleep(_LOOK_EVERY_SEC)
        except TimeoutError as error:
            raise ContainerStartError(
                "Another episode runs on this machine with container=host, and only one can at a time. Wait until it "
                "ends, or use container=docker."
            ) from error
        yield descriptor
    finally:
        os.close(descriptor)


def _is_locked_by(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
