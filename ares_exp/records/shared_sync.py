"""One sync to disk for all threads that wait for one."""

from __future__ import annotations

import threading
from pathlib import Path

from ares_exp.records.run_dir import sync_to_disk


class SharedSync:
    """Syncs one file or directory; threads that ask during a sync are served together by the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._syncing = threading.Lock()
        self._counting = threading.Lock()
        self._asked = self._served = 0

    def sync(self) -> None:
        """Returns when everything that was written to `path` before this call survives a power cut.

        Raises:
            OSError: It cannot be synced.
        """
        with self._counting:
            self._asked += 1
            number = self._asked
        with self._syncing:
            if self._served >= number:
                return
            serves = self._asked  # whoever asks from now on has perhaps written after the sync began
            sync_to_disk(self._path)
            self._served = serves
