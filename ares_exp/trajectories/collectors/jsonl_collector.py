"""The collector that appends all episodes of a run to one JSON Lines file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import validate_call

from ares_exp.records.durability import Durability
from ares_exp.records.run_dir import append_text
from ares_exp.records.shared_sync import SharedSync
from ares_exp.trajectories.collector import EpisodeCollector, EpisodeHandle
from ares_exp.trajectories.collectors.grouped_sync import GroupedSync
from ares_exp.trajectories.files.jsonl_file import begin_line, end_line, jsonl_lines, step_line
from ares_exp.trajectories.files.writer_lock import WriterLock
from ares_exp.trajectories.records import EpisodeTrajectory


class JsonlTrajectoryCollector(EpisodeCollector):
    """Appends a line at every step to one file, which can be read, or followed with `tail -f`, while it grows."""

    @validate_call
    def __init__(
        self, path: str | Path, *, durability: Durability = "episode", clock: Callable[[], float] = time.time
    ) -> None:
        """Takes the file; `begin_episode` makes it.

        Args:
            path: The file; made, and its directory, when the first episode begins.
            durability: What a power cut may take; see `Durability`.
            clock: Gives epoch seconds.
        """
        super().__init__(clock=clock)
        self.path = Path(path)
        self._durability = durability
        self._sync = GroupedSync()
        self._written, self._name = SharedSync(self.path), SharedSync(self.path.parent)
        self._writing = WriterLock()

    def close(self) -> None:
        """Ends the syncing thread. Idempotent."""
        self._sync.close()

    def _begun(self, handle: EpisodeHandle) -> None:
        head = begin_line(handle)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            # First the lock: whoever finds our line must not take us for dead.
            self._writing.acquire(self.path, handle.episode_id)
            append_text(self.path, f"{_line_end(self.path)}{head}")
            if self._durability == "step":
                self._sync.want(self.path.parent)
        except OSError as error:  # no reason not to collect: there may be room again when the episode ends
            handle.unwritten = error

    def _recorded(self, handle: EpisodeHandle, encoded: Mapping[str, Any]) -> None:
        if handle.unwritten is not None:
            if len(handle.steps) == 1:
                raise handle.unwritten  # told once
            return
        try:
            append_text(self.path, step_line(handle.episode_id, encoded))
        except OSError as error:
            handle.unwritten = error
            raise
        if self._durability == "step":
            self._sync.want(self.path)

    def _ended(self, handle: EpisodeHandle, trajectory: EpisodeTrajectory) -> None:
        try:
            lines = end_line(trajectory) if handle.unwritten is None else "".join(jsonl_lines(trajectory))
            append_text(self.path, lines, flags=os.O_CREAT)
            if self._durability != "none":
                self._written.sync()
                self._name.sync()
        finally:
            self._writing.release(handle.episode_id)


def _line_end(path: Path) -> str:
    """Returns what must precede a new line: a crash of the machine may have left half of one."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return "" if file.read(1) == b"\n" else "\n"
    except OSError:  # there is no file yet, or nothing in it
        return ""
