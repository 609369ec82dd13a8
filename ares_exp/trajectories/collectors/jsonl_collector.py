"""The collector that appends all episodes of a run to one JSON Lines file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import validate_call

from ares_exp.records.appended_file import AppendedFile
from ares_exp.records.durability import Durability
from ares_exp.records.shared_sync import SharedSync
from ares_exp.trajectories.collector import EndedEpisode, EpisodeCollector, EpisodeHandle, for_each
from ares_exp.trajectories.collectors.grouped_sync import GroupedSync
from ares_exp.trajectories.files.jsonl_file import begin_line, end_line, jsonl_lines, step_line
from ares_exp.trajectories.files.writer_lock import WriterLock


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
        self._file: AppendedFile | None = None
        self._opening = threading.Lock()

    def close(self) -> None:
        """Ends the syncing thread. Idempotent."""
        self._sync.close()

    def _begun(self, handle: EpisodeHandle) -> None:
        head = begin_line(handle)
        try:
            file = self._held_file()
            # First the lock: whoever finds our line must not take us for dead.
            self._writing.acquire(self.path, handle.episode_id)
            file.append(head)
            if self._durability == "step":
                self._sync.want(self.path.parent)
        except OSError as error:  # no reason not to collect: there may be room again when the episode ends
            handle.unwritten = error

    def _held_file(self) -> AppendedFile:
        """Returns the file, which is held open while there are open episodes."""
        with self._opening:
            if self._file is None:
                file = AppendedFile.open(self.path, flags=os.O_CREAT)
                if _is_torn(self.path):
                    file.append("\n")
                self._file = file
            return self._file

    def _recorded(self, handle: EpisodeHandle, encoded: Mapping[str, Any]) -> None:
        if handle.unwritten is not None:
            if len(handle.steps) == 1:
                raise handle.unwritten  # told once
            return
        try:
            self._held_file().append(step_line(handle.episode_id, encoded))
        except OSError as error:
            handle.unwritten = error
            raise
        if self._durability == "step":
            self._sync.want(self.path)

    def _ended_together(self, ended: Sequence[EndedEpisode]) -> None:
        """Writes how they ended; one sync is for all of them."""
        try:
            self._look_for_file(ended)
            for_each(ended, self._write_end)
            if self._durability != "none" and ended:
                self._sync_all(ended)
        finally:
            self._let_go(ended)

    def _look_for_file(self, ended: Sequence[EndedEpisode]) -> None:
        """Begins another file where somebody has removed this one: what it had of open episodes is written again."""
        with self._opening:
            if self._file is None or self._file.is_in_place:
                return
            self._file.close()
            self._file = None
        with self._lock:
            for handle in (*self._open.values(), *(one.handle for one in ended)):
                handle.unwritten = handle.unwritten or FileNotFoundError(f"{self.path} was removed")

    def _write_end(self, one: EndedEpisode) -> None:
        is_whole = one.handle.unwritten is None
        self._held_file().append(end_line(one.trajectory) if is_whole else "".join(jsonl_lines(one.trajectory)))

    def _sync_all(self, ended: Sequence[EndedEpisode]) -> None:
        try:
            self._written.sync()
            self._name.sync()
        except OSError as error:
            for one in ended:
                one.failure = one.failure or error

    def _let_go(self, ended: Sequence[EndedEpisode]) -> None:
        for one in ended:
            self._writing.release(one.handle.episode_id)
        with self._opening:
            if self._file is not None and not self._open:
                self._file.close()
                self._file = None


def _is_torn(path: Path) -> bool:
    """Whether a new line must be begun: a crash of the machine may have left half of one."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")
