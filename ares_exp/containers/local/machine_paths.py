"""The paths of this machine that a task uses with `container=host`: checked, recorded, and removed with the episode.

The record (`guardian.MADE`) is written before a task's files are, so that the guardian, the next run or `clean` can
remove them after any end of this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.images.dockerfile_reading import CopyStep, Dockerfile, MakeDirectoryStep
from ares_exp.containers.images.dockerfile_steps import find_sources
from ares_exp.containers.local.guardian import MADE
from ares_exp.errors import ContainerStartError, TransferError, UnsupportedTaskError


class MachinePaths:
    """The paths that one container makes on this machine. Methods block."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / MADE
        self._file.touch()
        self._known: set[str] = set()
        self._unsettled: set[str] = set()
        self._lock = threading.Lock()

    def claim(self, path: str) -> None:
        """Reserves a directory that the task fills. It must be missing or empty. `settle` creates it.

        Raises:
            ContainerStartError: The path exists and is not an empty directory.
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
        """Creates the reserved directories that are still missing, and records the identity of all reserved paths.

        Raises:
            OSError: A directory cannot be created.
        """
        with self._lock:
            for path in sorted(self._unsettled):
                if not os.path.lexists(path):
                    Path(path).mkdir()
                self._write(path, is_kept=False)
            self._unsettled.clear()

    def make_room(self, source: Path, target: str) -> list[str]:
        """Records what an upload will create.

        Args:
            source: A file, or a directory whose contents are copied into the directory `target`.
            target: An absolute path.

        Returns:
            The files that it has created, which the upload replaces.

        Raises:
            TransferError: A directory above `target` cannot be made.
        """
        try:
            with self._lock:
                needed = [(target, source.is_dir()), *_contents(source, target)]
                return [path for path, is_directory in needed if self._create_first_missing(path, is_directory)]
        except OSError as error:
            raise TransferError(f"Cannot copy {source} to {target} on this machine: {error}.") from error

    def renew(self, files: Iterable[str]) -> None:
        """Records the identity of files that an upload has replaced."""
        with self._lock, contextlib.suppress(FileNotFoundError):  # the container was stopped during the upload
            for path in files:
                self._write(path, is_kept=False)

    def _create_first_missing(self, path: str, is_directory: bool) -> bool:
        """Creates and records the topmost missing part of a path; returns whether it is a file."""
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
    """Checks that a task's files do not meet files of this machine.

    Raises:
        UnsupportedTaskError: Some paths exist. The message names them.
    """
    found = [_occupied(path) for path in task_directories(spec, dockerfile) if is_occupied(path)]
    if dockerfile is not None and spec.context_dir is not None:
        for step in dockerfile.steps:
            if isinstance(step, CopyStep):
                found += [f"{path} exists" for path in _replaced(step, spec.context_dir)]
                found += [f"its Dockerfile fills {one}" for one in spec.directories if _is_below(step.target, one)]
    if found:
        raise UnsupportedTaskError(
            f"{spec.name}: container=host uses the paths of this machine, and {'; '.join(dict.fromkeys(found))}. "
            "Move existing files away, or use container=docker."
        )


def task_directories(spec: ContainerSpec, dockerfile: Dockerfile | None) -> list[str]:
    """Returns the directories that a task fills: of its Dockerfile, its mounts and its episode."""
    steps = dockerfile.steps if dockerfile is not None else ()
    made = [step.path.rstrip("/") for step in steps if isinstance(step, MakeDirectoryStep)]
    return [path for path in dict.fromkeys((*made, *spec.directories, *(one.target for one in spec.mounts))) if path]


def is_occupied(path: str) -> bool:
    """Returns whether a path exists and is not an empty directory."""
    if not os.path.lexists(path):
        return False
    return not stat.S_ISDIR(os.lstat(path).st_mode) or any(Path(path).iterdir())


def _first_missing(path: str) -> str:
    """Returns the topmost part of a missing path that does not exist."""
    missing = Path(path)
    while not os.path.lexists(missing.parent):
        missing = missing.parent
    return str(missing)


def _is_below(path: str, directory: str) -> bool:
    return Path(path).is_relative_to(directory)


def _occupied(path: str) -> str:
    return f"{path} exists and is not an empty directory"


def _replaced(step: CopyStep, context: Path) -> Iterator[str]:
    """Yields the files and links of this machine that a COPY would replace."""
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
    """Yields the paths that a copy of the directory `source` has below `target`, and whether they are directories.

    Directories precede their contents.
    """
    for path in sorted(source.rglob("*")):
        yield posixpath.join(target, path.relative_to(source)), _is_directory(path)


def _is_directory(path: Path) -> bool:
    """Returns whether a path is a directory. A link to a directory is not."""
    return path.is_dir() and not path.is_symlink()
