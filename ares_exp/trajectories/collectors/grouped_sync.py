"""How durable a trajectory is while it is being written, and the thread that sees to it."""

from __future__ import annotations

import logging
import threading
import weakref
from pathlib import Path
from typing import Literal

from ares_exp.run_dir import sync_to_disk

logger = logging.getLogger(__name__)

Durability = Literal["none", "episode", "step"]
"""What a power cut may take: `none` whatever the kernel had not written yet, `episode` only episodes under way, `step`
only the last moments. `kill -9` takes nothing, whichever is chosen: what was written is the kernel's."""

JOIN_LIMIT_SEC = 30.0


class GroupedSync:
    """Syncs files to disk in a thread of its own: what is wanted while a sync runs is synced together after it."""

    def __init__(self) -> None:
        """The thread starts with the first wish."""
        self._queue = _Queue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._finalizer = weakref.finalize(self, self._queue.end)

    def want(self, path: Path) -> None:
        """Has `path` synced soon. Never waits."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=_serve, args=(self._queue,), name="trajectory sync", daemon=True)
                self._thread.start()
        self._queue.put(path)

    def close(self) -> None:
        """Syncs what is wanted and ends the thread. Idempotent."""
        self._finalizer()
        if self._thread is not None:
            self._thread.join(JOIN_LIMIT_SEC)


class _Queue:
    def __init__(self) -> None:
        self._paths: set[Path] = set()
        self._ended = False
        self._changed = threading.Condition()

    def put(self, path: Path) -> None:
        with self._changed:
            self._paths.add(path)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def take(self) -> set[Path]:
        """Everything that is wanted, as soon as something is; nothing when it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._paths or self._ended)
            paths, self._paths = self._paths, set()
            return paths


def _serve(queue: _Queue) -> None:
    while paths := queue.take():
        for path in paths:
            try:
                sync_to_disk(path)
            except FileNotFoundError:
                continue  # the episode has ended meanwhile: its finished file is synced by itself
            except OSError as error:
                logger.warning("%s could not be synced: %s", path, error)
