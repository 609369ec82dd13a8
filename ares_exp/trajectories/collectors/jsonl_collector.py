"""The collector that appends all episodes of a run to one JSON Lines file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import validate_call

from ares_exp.records.run_dir import append_durably, append_text
from ares_exp.trajectories.collector import EpisodeCollector, EpisodeHandle
from ares_exp.trajectories.files.episode_file import dump_episode, end_line, start_line, step_line
from ares_exp.trajectories.files.line_file import WriterLock
from ares_exp.trajectories.records import EpisodeTrajectory


class JsonlTrajectoryCollector(EpisodeCollector):
    """Appends a line to one file for every step. You can read or follow the file (`tail -f`) while it grows."""

    @validate_call
    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        """Creates the collector, but not the file yet.

        Args:
            path: The file. It and its directory are created when the first episode starts.
            clock: Function that returns epoch seconds.
        """
        super().__init__(clock=clock)
        self.path = Path(path)
        self._making = threading.Lock()
        self._was_made = False
        self._writing = WriterLock()

    def _started(self, handle: EpisodeHandle) -> None:
        try:
            self._make_file(handle)
            # The lock comes first, because a process that finds our line without a lock assumes that we have died.
            self._writing.acquire(self.path, handle.episode_id)
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                torn = file.read(1) not in (b"", b"\n")  # a crash of the machine may have left half a line
            append_text(self.path, f"{chr(10) if torn else ''}{start_line(handle, shared=True)}")
        except OSError as error:  # collecting continues, because there may be space again when the episode ends
            handle.unwritten = error

    def _make_file(self, handle: EpisodeHandle) -> None:
        """Creates the file if it is missing. If it was removed, marks the other open episodes as not written."""
        with self._making:
            if self.path.exists():
                return
            if self._was_made:
                with self._lock:
                    for one in self._open.values():
                        if one is not handle:
                            one.unwritten = one.unwritten or FileNotFoundError(f"{self.path} was removed")
            append_text(self.path, "", flags=os.O_CREAT)
            self._was_made = True

    def _recorded(self, handle: EpisodeHandle, encoded: Mapping[str, Any]) -> None:
        self._append(handle, self.path, step_line(handle.episode_id, encoded, first=False, shared=True))

    def _ended(self, handle: EpisodeHandle, trajectory: EpisodeTrajectory) -> None:
        try:
            was_removed = not self.path.exists()
            self._make_file(handle)
            is_whole = handle.unwritten is None and not was_removed
            lines = [end_line(trajectory, shared=True)] if is_whole else dump_episode(trajectory, shared=True)
            append_durably(self.path, "".join(lines), is_new=True)
        finally:
            self._writing.release(handle.episode_id)
