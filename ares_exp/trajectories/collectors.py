"""Collectors that store the episodes of a run in memory or in files."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, validate_call

from ares_exp.records.run_dir import append_durably, append_text
from ares_exp.trajectories.collector import EpisodeCollector, EpisodeHandle
from ares_exp.trajectories.files.episode_file import dump_episode, end_line, start_line, step_line
from ares_exp.trajectories.files.line_file import ZSTD, WriterLock, write_lines
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord


class NullTrajectoryCollector(EpisodeCollector):
    """Stores nothing (`collector=none`). Still raises an error if a step is recorded while no episode is open."""

    def record_step(self, record: StepRecord, *, episode: EpisodeHandle | None = None) -> None:
        """Drops the step. Raises `RuntimeError` if no episode is open."""
        self._resolve(episode)


class MemoryTrajectoryCollector(EpisodeCollector):
    """Keeps finished episodes in `episodes`, in the order in which they ended. Use it in notebooks and trainers."""

    @validate_call
    def __init__(
        self, *, keep: Annotated[int, Field(ge=1)] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Creates a collector without episodes.

        Args:
            keep: Number of episodes to keep. Older episodes are dropped. `None` keeps all episodes.
            clock: Function that returns epoch seconds.
        """
        super().__init__(clock=clock)
        self.episodes: list[EpisodeTrajectory] = []
        self._keep = keep

    def _ended(self, handle: EpisodeHandle, trajectory: EpisodeTrajectory) -> None:
        self.episodes.append(trajectory)
        if self._keep is not None:
            del self.episodes[: -self._keep]


SAFE_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}")


class JsonTrajectoryCollector(EpisodeCollector):
    """Writes each episode to a file `{output_dir}/{episode_id}.json`.

    Each step is written as soon as it is recorded (see `episode_file`), so that `kill -9` loses no recorded step. When
    the episode has ended, the file is one JSON document. While episodes are open, the collector holds a shared lock on
    the directory, so that readers can distinguish running episodes from lost episodes.
    """

    @validate_call
    def __init__(
        self,
        output_dir: str | Path,
        *,
        compression: Literal["zstd"] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Creates the collector, but no files yet.

        Args:
            output_dir: Directory of the files, which is created when the first episode starts.
            compression: `"zstd"` compresses each file to `{episode_id}.json.zst` when the episode ends. By default,
                files are not compressed.
            clock: Function that returns epoch seconds.
        """
        super().__init__(clock=clock)
        self.output_dir = Path(output_dir)
        self.suffix = f".json{ZSTD}" if compression == "zstd" else ".json"
        self._directory = WriterLock()

    def _started(self, handle: EpisodeHandle) -> None:
        """Creates the episode's file. Raises an error if the episode id is not a safe file name, or the file exists."""
        episode_id, path = handle.episode_id, self._path(handle)
        if not SAFE_NAME.fullmatch(episode_id):
            raise ValueError(
                "Expected an episode id of letters, digits, '.', '_' and '-', not starting with '.', "
                f"got {episode_id!r}."
            )
        if os.path.exists(f"{path}{ZSTD}"):  # noqa: PTH110 - making a Path for each episode is slower
            raise _taken(episode_id, f"{path}{ZSTD}")
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._directory.acquire(self.output_dir, episode_id)
            append_text(path, start_line(handle), flags=os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            self._directory.release(episode_id)
            raise _taken(episode_id, path) from None
        except OSError as error:
            handle.unwritten = error  # collecting continues, because there may be space again when the episode ends

    def _recorded(self, handle: EpisodeHandle, encoded: Mapping[str, Any]) -> None:
        line = step_line(handle.episode_id, encoded, first=len(handle.steps) == 1)
        self._append(handle, self._path(handle), line)

    def _ended(self, handle: EpisodeHandle, trajectory: EpisodeTrajectory) -> None:
        path, is_compressed = self._path(handle), self.suffix.endswith(ZSTD)
        try:
            if handle.unwritten is None and not is_compressed:
                with contextlib.suppress(FileNotFoundError):  # removed by another process
                    append_durably(path, end_line(trajectory), is_new=True)
                    return
            self.output_dir.mkdir(parents=True, exist_ok=True)
            write_lines(self.output_dir / f"{handle.episode_id}{self.suffix}", dump_episode(trajectory))
            if is_compressed:
                Path(path).unlink(missing_ok=True)
        finally:
            self._directory.release(handle.episode_id)

    def _path(self, handle: EpisodeHandle) -> str:
        return f"{self.output_dir}/{handle.episode_id}.json"


def _taken(episode_id: str, path: str) -> FileExistsError:
    return FileExistsError(f"Expected a new episode id, got {episode_id!r}: {path} already exists.")


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
            # The lock comes first, because readers that find a line but no lock assume that this process has died.
            self._writing.acquire(self.path, handle.episode_id)
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                torn = file.read(1) not in (b"", b"\n")  # a crash of the machine may have left half a line
            append_text(self.path, f"{chr(10) if torn else ''}{start_line(handle, shared=True)}")
        except OSError as error:  # collecting continues, because there may be space again when the episode ends
            handle.unwritten = error

    def _make_file(self, handle: EpisodeHandle) -> None:
        """Creates the file if it is missing.

        If the file was created before and is missing now, another process has removed it. All other open episodes are
        then marked as unwritten, so that they are written completely when they end.
        """
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
