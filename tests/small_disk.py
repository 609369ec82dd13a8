"""A small file system on which tests fill the disk of a run, or take it away."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

FILLER = "filler"


class SmallDisk:
    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.path = path
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=755", "tmpfs", path], check=True)

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.path / FILLER).open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def free(self) -> None:
        (self.path / FILLER).unlink()


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(path)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
