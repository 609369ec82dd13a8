"""The collector that writes one JSON file an episode."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import validate_call

from ares_exp.records.appended_file import AppendedFile
from ares_exp.records.durability import Durability
from ares_exp.records.shared_sync import SharedSync
from ares_exp.trajectories.collector import EndedEpisode, EpisodeCollector, EpisodeHandle, for_each
from ares_exp.trajectories.collectors.grouped_sync import GroupedSync
from ares_exp.trajectories.files.episode_file import PARTIAL, closing_line, dump_episode, opening_line, step_line
from ares_exp.trajectories.files.line_file import ZSTD, write_lines
from ares_exp.trajectories.files.writer_lock import WriterLock

SAFE_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


class JsonTrajectoryCollector(EpisodeCollector):
    """Writes `{output_dir}/{episode_id}.json`, step by step.

    Each step goes to `….json.partial` when it is recorded (see `episode_file`): `kill -9` loses none. The finished file
    appears whole when the episode ends. While episodes are open the directory is locked (shared), so that whoever
    recovers partial files can tell that their writer is alive.
    """

    @validate_call
    def __init__(
        self,
        output_dir: str | Path,
        *,
        compression: Literal["zstd"] | None = None,
        durability: Durability = "episode",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes the directory; `begin_episode` makes it.

        Args:
            output_dir: Made when the first episode begins.
            compression: `"zstd"` writes `{episode_id}.json.zst`.
            durability: What a power cut may take; see `Durability`.
            clock: Gives epoch seconds.
        """
        super().__init__(clock=clock)
        self.output_dir = Path(output_dir)
        self.suffix = f".json{ZSTD}" if compression == "zstd" else ".json"
        self._durability = durability
        self._sync = GroupedSync()
        self._names = SharedSync(self.output_dir)
        self._directory = WriterLock()
        self._partials: dict[str, AppendedFile] = {}

    def begin_episode(
        self,
        *,
        task_name: str,
        episode_id: str | None = None,
        start_time: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeHandle:
        """Opens an episode; its id must be usable as a file name, and new in the directory.

        Raises:
            FileExistsError: There is a file of an episode with this id; it stays as it is.
            ValueError: The id is no name of a file.
        """
        if episode_id is not None and (not SAFE_NAME.fullmatch(episode_id) or episode_id.startswith(".")):
            raise ValueError(
                "Expected an episode id of letters, digits, '.', '_' and '-', not beginning with '.', "
                f"got {episode_id!r}."
            )
        if episode_id is not None:
            self._refuse_taken(episode_id)
        try:
            return super().begin_episode(
                task_name=task_name, episode_id=episode_id, start_time=start_time, metadata=metadata
            )
        except FileExistsError:
            if episode_id is not None:
                self._forget(episode_id)
            raise

    def close(self) -> None:
        """Ends the syncing thread. Idempotent."""
        self._sync.close()

    def _begun(self, handle: EpisodeHandle) -> None:
        partial = f"{self.output_dir}/{handle.episode_id}{self.suffix}{PARTIAL}"
        try:
            self._hold_directory(handle.episode_id)
            file = AppendedFile.open(partial, flags=os.O_CREAT | os.O_EXCL)
            self._partials[handle.episode_id] = file
            file.append(opening_line(handle))
            if self._durability == "step":
                self._sync.want(self.output_dir)
        except OSError as error:
            if isinstance(error, FileExistsError) and Path(partial).exists():
                raise _taken(handle.episode_id, partial) from None
            handle.unwritten = error  # no reason not to collect: there may be room again when the episode ends

    def _hold_directory(self, holder: str) -> None:
        try:
            self._directory.acquire(self.output_dir, holder)
        except FileNotFoundError:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._directory.acquire(self.output_dir, holder)

    def _recorded(self, handle: EpisodeHandle, encoded: Mapping[str, Any]) -> None:
        first = len(handle.steps) == 1
        if handle.unwritten is not None:
            if first:
                raise handle.unwritten  # told once
            return
        file = self._partials[handle.episode_id]
        try:
            file.append(step_line(encoded, first=first))
        except OSError as error:
            handle.unwritten = error
            raise
        if self._durability == "step":
            self._sync.want(Path(file.path))

    def _ended_together(self, ended: Sequence[EndedEpisode]) -> None:
        """Makes the finished files: what is written of all of them goes to the disk at the same time."""
        try:
            for_each(ended, self._write_end)
            for_each(ended, self._finish)
            if self._durability != "none" and ended:
                self._sync_names(ended)
            super()._ended_together(ended)
        finally:
            for one in ended:
                self._forget_file(one.handle.episode_id)

    def _write_end(self, one: EndedEpisode) -> None:
        """Writes the last line, where the file has all others and can be finished."""
        if one.handle.unwritten is not None or self.suffix.endswith(ZSTD):
            return
        file = self._partials[one.handle.episode_id]
        file.append(closing_line(one.trajectory))
        if self._durability != "none":
            file.begin_sync()

    def _finish(self, one: EndedEpisode) -> None:
        """Gives the partial file its name, when it is on the disk; one that lacks something is replaced."""
        file = self._partials.get(one.handle.episode_id)
        path = f"{self.output_dir}/{one.handle.episode_id}{self.suffix}"
        if one.handle.unwritten is None and file is not None and not path.endswith(ZSTD):
            if self._durability != "none":
                file.sync()
            with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                os.rename(file.path, path)  # noqa: PTH104 - a Path for each episode costs more than the call
                return
        self.output_dir.mkdir(parents=True, exist_ok=True)
        write_lines(Path(path), dump_episode(one.trajectory), sync=self._durability != "none")
        Path(f"{path}{PARTIAL}").unlink(missing_ok=True)

    def _sync_names(self, ended: Sequence[EndedEpisode]) -> None:
        try:
            self._names.sync()
        except OSError as error:
            for one in ended:
                one.failure = one.failure or error

    def _refuse_taken(self, episode_id: str) -> None:
        path = f"{self.output_dir}/{episode_id}{self.suffix}"  # that of a partial file is seen when it is made
        if os.path.exists(path):  # noqa: PTH110 - a Path for each episode costs more than the look
            raise _taken(episode_id, path)

    def _forget(self, episode_id: str) -> None:
        """Takes an episode back that could not begin."""
        with self._lock:
            del self._open[episode_id]
        self._forget_file(episode_id)

    def _forget_file(self, episode_id: str) -> None:
        if (file := self._partials.pop(episode_id, None)) is not None:
            file.close()
        self._directory.release(episode_id)


def _taken(episode_id: str, path: Path | str) -> FileExistsError:
    return FileExistsError(f"Expected a new episode id, got {episode_id!r}: {path} is there already.")
