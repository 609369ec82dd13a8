"""Resource usage of this process: memory, processor time, threads, open files."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path


class ProcessFigures:
    """Figures of this process, without those of the containers or of other processes that it started."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def take(self) -> dict[str, float]:
        """Returns the figures by metric; leaves out those that the system does not provide.

        `system/cpu_percent` is the mean since the last call (100 is one core), `system/rss_mb` are MiB.
        """
        wall, cpu = time.monotonic(), time.process_time()
        figures: dict[str, float] = {"system/threads": threading.active_count()}
        if wall > self._wall:
            figures["system/cpu_percent"] = 100 * (cpu - self._cpu) / (wall - self._wall)
        self._wall, self._cpu = wall, cpu
        with suppress(OSError, ValueError, IndexError):  # there is no /proc on macOS
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            figures["system/rss_mb"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        with suppress(OSError), os.scandir("/dev/fd") as listed:
            figures["system/open_files"] = sum(1 for _ in listed) - 1  # without the descriptor of the listing itself
        return figures
