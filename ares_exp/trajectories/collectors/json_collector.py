"""The collector that writes one JSON file per episode."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import validate_call

from ares_exp.records.run_dir import append_durably, append_text
from ares_exp.trajectories.collector import EpisodeCollector, EpisodeHandle
from ares_exp.trajectories.files.episode_file import dump_episode, end_line, start_line, step_line
from ares_exp.trajectories.files.line_file import ZSTD, WriterLock, write_lines
from ares_exp.trajectories.records import EpisodeTrajectory

SAFE_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


class JsonTrajectoryCollector(EpisodeCollector):
    """Writes each episode to a file `{output_dir}/{episode_id}.json`.

    Each step is written as soon as it is recorded (see `episode_file`), so `kill -9` loses no step. When the episode
    has ended, the file is one JSON document. While episodes are open, the collector holds a shared lock on the
    directory, so that readers can distinguish running episodes from lost episodes.
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
            compression: `"zstd"` replaces `{episode_id}.json` with `{episode_id}.json.zst` when the episode ends.
            clock: Function that returns epoch seconds.
        """
        super().__init__(clock=clock)
        self.output_dir = Path(output_dir)
        self.suffix = f".json{ZSTD}" if compression == "zstd" else ".json"
        self._directory = WriterLock()

    def begin_episode(
        self,
        *,
        task_name: str,
        episode_id: str | None = None,
        start_time: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeHandle:
        """Opens an episode. Its id must be a valid file name, and new in the directory.

        Raises:
            FileExistsError: A file of an episode with this id exists. It is not changed.
            ValueError: The id is not a valid file name.
        """
        if episode_id is not None and (not SAFE_NAME.fullmatch(episode_id) or episode_id.startswith(".")):
            raise ValueError(
                "Expected an episode id of letters, digits, '.', '_' and '-', not starting with '.', "
                f"got {episode_id!r}."
            )
        if episode_id is not None:
            path = f"{self.output_dir}/{episode_id}.json{ZSTD}"  # an existing `.json` file is detected in `_started`
            if os.path.exists(path):  # noqa: PTH110 - making a Path for each episode is slower
                raise _taken(episode_id, path)
        try:
            return super().begin_episode(
                task_name=task_name, episode_id=episode_id, start_time=start_time, metadata=metadata
            )
        except FileExistsError:
            if episode_id is not None:
                with self._lock:
                    del self._open[episode_id]
                self._directory.release(episode_id)
            raise

    def _started(self, handle: EpisodeHandle) -> None:
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._directory.acquire(self.output_dir, handle.episode_id)
            append_text(self._path(handle), start_line(handle), flags=os.O_CREAT | os.O_EXCL)
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise _taken(handle.episode_id, self._path(handle)) from None
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


def _taken(episode_id: str, path: Path | str) -> FileExistsError:
    return FileExistsError(f"Expected a new episode id, got {episode_id!r}: {path} already exists.")
