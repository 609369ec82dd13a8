"""The files that several local containers start with: written and checked once, copied for each.

They are copied, and not the lower layer of an overlay: there, the kernel refuses to rename a directory, and what is
written to one name of a file is not seen under its others. An agent would see whether its set-up was shared.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from ares_exp.containers.local.container_directory import ContainerDirectory
from ares_exp.errors import SnapshotError

_COPY_SEC = 300.0
_ROOM = 0.25
# GNU's; others refuse `--preserve`, and would lose attributes.
_COPY = ("cp", "-dR", "--preserve=mode,ownership,timestamps,links,xattr", "--")

_logger = logging.getLogger(__name__)


class PreparedFiles:
    """Such files, a `Kept`. In a directory of this process, which is removed like those of its containers.

    They are given up where they would take much of the room of containers, and when something goes wrong.
    """

    def __init__(self) -> None:
        """Creates nothing yet."""
        self._lock = threading.Lock()
        self._directory: ContainerDirectory | None = None
        self._what: object = None
        self._is_given_back = False

    def copied_to(
        self, directory: Path, folders: tuple[str, ...], what: object, size: int, write: Callable[[Path], None]
    ) -> bool:
        """Copies them into the directory of a container. Blocking.

        Args:
            directory: Has none of the `folders`.
            folders: Folders in it that hold the files.
            what: Tells what they are: if they were written for a container with others, they are not copied.
            size: Their bytes.
            write: Writes them into a directory, the first time.

        Returns:
            Whether they are there; if not, nothing of them is.
        """
        source = self._written(directory.parent, what, size, write)
        if source is None:
            return False
        try:
            done = subprocess.run(
                [*_COPY, *(source / folder for folder in folders), directory],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={"PATH": os.defpath, "LC_ALL": "C"},
                start_new_session=True,  # Ctrl-C ends the container in order
                timeout=_COPY_SEC,
                check=False,
            )
            why = done.stderr.decode(errors="replace").strip()[-500:] if done.returncode else None
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why is None:
            return True
        _logger.info("The files of a container are written one by one, as they cannot be copied: %s", why)
        self._remove()
        for folder in folders:
            shutil.rmtree(directory / folder, ignore_errors=True)
        return False

    def _written(self, parent: Path, what: object, size: int, write: Callable[[Path], None]) -> Path | None:
        with self._lock:
            if self._is_given_back:
                return None
            if self._directory is None:
                if size > shutil.disk_usage(parent).free * _ROOM:
                    self._is_given_back = True
                    return None
                self._directory, self._what = ContainerDirectory(parent), what
                try:
                    write(self._directory.path)
                except (SnapshotError, OSError):  # written for the container itself, they tell what is wrong
                    self._is_given_back = True
                    self._directory.remove()
                    return None
            return self._directory.path if what == self._what else None

    async def give_back(self) -> None:
        """As `Kept.give_back`."""
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        with self._lock:
            self._is_given_back = True
            if self._directory is not None:
                self._directory.remove()
