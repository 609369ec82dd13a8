"""A thread that syncs files to disk, several requests at a time."""

from __future__ import annotations

import logging
import threading
import weakref
from pathlib import Path

from ares_exp.records.run_dir import sync_to_disk

logger = logging.getLogger(__name__)

JOIN_LIMIT_SEC = 30.0


class GroupedSync:
    """Syncs files to disk in one thread: requests during a sync are served together after it."""

    def __init__(self) -> None:
        self._queue = _Queue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._finalizer = weakref.finalize(self, self._queue.end)

    def want(self, path: Path) -> None:
        """Requests a sync of `path` soon. Never waits."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=_serve, args=(self._queue,), name="trajectory sync", daemon=True)
                self._thread.start()
        self._queue.put(path)

    def close(self) -> None:
        """Syncs what was requested and ends the thread. Idempotent."""
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
        """Waits for requested paths and returns them; none when the queue has ended."""
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
