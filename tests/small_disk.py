"""A small file system on which tests fill the disk of a run, or take it away."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

FILLER = "filler"


class SmallDisk:
    """A mounted tmpfs."""

    def __init__(self, path: Path) -> None:
        """Mounts it on `path`, a new directory."""
        path.mkdir(parents=True)
        self.path = path
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=755", "tmpfs", path], check=True)

    def fill(self) -> None:
        """Writes a file until no byte is free."""
        with contextlib.suppress(OSError), (self.path / FILLER).open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def free(self) -> None:
        """Deletes that file."""
        (self.path / FILLER).unlink()


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    """Mounts a small disk, and unmounts it at the end."""
    disk = SmallDisk(path)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


class MountedFolder:
    """A folder that is mounted in another place, and keeps its files while it is not.

    Attributes:
        is_mounted: Whether it is mounted.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        """Makes the folder, and mounts it on `path`."""
        folder.mkdir(parents=True)
        self._folder, self._path = folder, path
        self.is_mounted = False
        self.mount()

    def mount(self) -> None:
        """Mounts it."""
        self._path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", self._folder, self._path], check=True)
        self.is_mounted = True

    def unmount(self) -> None:
        """Takes it away at once, although processes have open files on it."""
        subprocess.run(["umount", "--lazy", self._path], check=True)
        self.is_mounted = False


@contextlib.contextmanager
def mounted_folder(folder: Path, path: Path) -> Iterator[MountedFolder]:
    """Mounts a folder, and unmounts it at the end."""
    mounted = MountedFolder(folder, path)
    try:
        yield mounted
    finally:
        if mounted.is_mounted:
            mounted.unmount()
