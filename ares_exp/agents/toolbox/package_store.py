"""The cache of installed agents. Builds are added and removed atomically.

A build is in `<folder>/<key>/`, with a list of its files in `ares_exp.json`. The installing process creates it in a
temporary directory and then renames it. Two processes that install the same build wait for each other. Builds in use by
a running process are not removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ares_exp.agents.toolbox.package import Build
from ares_exp.containers.container import Mount
from ares_exp.containers.ownership import OwnedDirectory, delete, find_directories, name_prefix
from ares_exp.containers.user_cache import hold, user_cache_dir
from ares_exp.errors import ToolboxError

MANIFEST = "ares_exp.json"
_PURPOSE = "agent"
_POLL_SEC = 0.2
_CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed build.

    Attributes:
        build: Build that is installed.
        path: Directory of the build.
        digest: Digest of its files.
        size: Total size of its files in bytes.
    """

    build: Build
    path: Path
    digest: str
    size: int

    @property
    def mount(self) -> Mount:
        """Mount of the build for containers."""
        return Mount(self.path, self.build.target, self.digest)


class AgentStore:
    """The builds installed for this user. Methods block, and several processes may use the store at the same time."""

    def __init__(self, folder: Path | None = None) -> None:
        """Sets the folder, which is created by the first installation.

        Args:
            folder: Folder of the store; defaults to `agents` in the user's cache directory.
        """
        self.folder = folder or user_cache_dir() / "agents"

    def place(self, build: Build) -> Path:
        """Returns the path of a build, which may be missing."""
        return self.folder / build.key

    def find(self, build: Build, *, thoroughly: bool = False) -> Installed | None:
        """Returns a build if it exists and is complete, otherwise `None`.

        Args:
            build: Build to find.
            thoroughly: Whether to compare the digests of the files in addition to their sizes.
        """
        place = self.place(build)
        if not place.is_dir():
            return None
        try:
            manifest = json.loads((place / MANIFEST).read_bytes())
            files: dict[str, list[object]] = manifest["files"]
            for name, (size, mode, digest) in files.items():
                status = (place / name).lstat()
                if (status.st_size, f"{stat.S_IMODE(status.st_mode):o}") != (size, mode):
                    return None
                if thoroughly and _digest(place / name) != digest:
                    return None
            return Installed(build, place, _digest_of(files), sum(entry[0] for entry in files.values()))  # type: ignore[misc]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(
        self, build: Build, make: Callable[[Path], None], *, stop: threading.Event, timeout_sec: float
    ) -> Installed:
        """Returns a build. If it is missing or incomplete, creates it first.

        Args:
            build: Build to return.
            make: Function that fills the given directory. It is called at most once, and by one process at a time.
            stop: Event that ends the wait for another process.
            timeout_sec: Upper bound on that wait in seconds.

        Raises:
            ToolboxError: The build cannot be created or stored.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            hold(self.folder)
            with self._locked(build, stop, timeout_sec):
                if (found := self.find(build)) is not None:
                    return found
                with self._workspace() as workspace:
                    made = workspace / build.key
                    made.mkdir()
                    make(made)
                    _seal(made, build)
                    self._put(made, build)
        except OSError as error:
            raise ToolboxError(
                f"{build.name} cannot be installed in {self.folder}: {error.strerror or error}. Free some space there, "
                "or set another XDG_CACHE_HOME."
            ) from error
        found = self.find(build)
        if found is None:
            raise ToolboxError(
                f"{build.name} was installed in {self.place(build)}, and has since been deleted. Install it again."
            )
        return found

    def use(self, build: Build) -> Installed | None:
        """Returns a build like `find`, and prevents its removal while this process lives."""
        if not self.place(build).is_dir():
            return None
        hold(self.folder)
        hold(self.place(build))
        return self.find(build)  # another process may just have removed it

    def remove(self, build: Build) -> bool:
        """Removes a build. Returns whether it existed.

        Raises:
            ToolboxError: A running process uses the build, or it cannot be removed.
        """
        place = self.place(build)
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self._workspace() as workspace:
                place.rename(workspace / "removed")
        except BlockingIOError:
            raise ToolboxError(f"{place} is in use by a running process. Remove it when that has ended.") from None
        except OSError as error:
            raise ToolboxError(f"{place} cannot be removed: {error.strerror}.") from error
        finally:
            os.close(descriptor)
        return True

    def _put(self, made: Path, build: Build) -> None:
        """Renames a created build to its final path, after moving an incomplete build out of the way."""
        place = self.place(build)
        if place.exists():
            place.rename(made.with_name("replaced"))
        made.rename(place)

    @contextmanager
    def _locked(self, build: Build, stop: threading.Event, timeout_sec: float) -> Iterator[None]:
        """Prevents other processes and threads from installing the same build.

        The kernel releases the lock when this process ends.
        """
        deadline = time.monotonic() + timeout_sec
        descriptor = os.open(self.folder / f".{build.key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _taken(descriptor):
                if stop.wait(_POLL_SEC) or time.monotonic() > deadline:
                    raise ToolboxError(
                        f"Another process is installing {build.name} {build.version}. Wait until it has ended."
                    )
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _workspace(self) -> Iterator[Path]:
        """Creates a temporary directory next to the builds and removes it afterwards.

        Also removes leftovers of killed processes.
        """
        directory = OwnedDirectory(f"{name_prefix(_PURPOSE)}{os.getpid()}-", self.folder)
        try:
            for leftover in find_directories(_PURPOSE, "directory", delete, [self.folder]):
                if leftover.is_stale:
                    leftover.remove()
            yield directory.path
        finally:
            directory.remove()


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _seal(made: Path, build: Build) -> None:
    """Makes all files readable for everyone and read-only, and writes the list of files."""
    files: dict[str, list[object]] = {}
    for path in sorted(made.rglob("*")):
        if path.is_symlink():
            raise ToolboxError(f"The package of {build.name} has a link where a file was expected: {path.name!r}.")
        if path.is_dir():
            path.chmod(0o755)
            continue
        path.chmod(0o555 if path.stat().st_mode & 0o100 else 0o444)
        status = path.stat()
        mode = f"{stat.S_IMODE(status.st_mode):o}"
        files[path.relative_to(made).as_posix()] = [status.st_size, mode, _digest(path)]
    made.chmod(0o755)
    manifest = {"name": build.name, "version": build.version, "build": build.key, "files": files}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _digest_of(files: dict[str, list[object]]) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()}"
