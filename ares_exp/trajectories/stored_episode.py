"""One episode on disk: what a file says of it without its steps, and the way to all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ares_exp.errors import TrajectoryFormatError
from ares_exp.llms.request import freeze
from ares_exp.results import ErrorInfo, Outcome
from ares_exp.trajectories.episode_places import finished_path, is_partial
from ares_exp.trajectories.files.episode_file import load_header, salvage_episode
from ares_exp.trajectories.files.formats import format_of
from ares_exp.trajectories.files.jsonl_file import read_jsonl
from ares_exp.trajectories.files.jsonl_index import index_jsonl
from ares_exp.trajectories.files.parquet_file import RowPlace, parquet_headers, read_parquet
from ares_exp.trajectories.files.writer_lock import has_writer
from ares_exp.trajectories.records import EpisodeTrajectory, episode_fields


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """One episode, its steps left on disk. Can be pickled, for the workers of a data loader.

    Attributes:
        path: The file that has it.
        episode_id, task_name, total_reward, num_steps, start_time, end_time, error, metadata: As in
            `EpisodeTrajectory`.
        outcome: As there; `None` while the process that plays it is alive.
    """

    path: Path
    episode_id: str
    task_name: str
    outcome: Outcome | None
    total_reward: float | None
    num_steps: int
    start_time: float
    end_time: float
    error: ErrorInfo | None
    metadata: Mapping[str, Any]
    _read: Callable[[], EpisodeTrajectory] = field(repr=False, compare=False)

    def load(self) -> EpisodeTrajectory:
        """All of it; nothing is kept here.

        Raises:
            TrajectoryFormatError: The file is broken; the message names the path and the place.
        """
        return self._read()

    def row(self) -> dict[str, Any]:
        """One row of a table: plain values, one a column; `metadata.…` has those of the metadata that are plain."""
        row: dict[str, Any] = {name: getattr(self, name) for name in _COLUMNS}
        row["outcome"] = None if self.outcome is None else self.outcome.value
        row["duration_sec"] = self.end_time - self.start_time
        row["error_type"] = None if self.error is None else self.error.type
        row["error_message"] = None if self.error is None else self.error.message
        plain = {key: value for key, value in self.metadata.items() if isinstance(value, str | int | float | None)}
        return {**row, "path": str(self.path), **{f"metadata.{key}": value for key, value in plain.items()}}


_COLUMNS = ("episode_id", "task_name", "outcome", "total_reward", "num_steps", "start_time", "end_time")
_HEADER = (*_COLUMNS, "error", "metadata")


def read_headers(
    path: Path, *, unfinished: bool, broken: list[str] | None, left_out: list[str]
) -> Iterator[StoredEpisode]:
    """The episodes of a file, their steps not read where the format allows that.

    Args:
        path: The file, of any format.
        unfinished: Whether episodes without an end count.
        broken: Takes, in sentences, what is broken in a file whose other episodes can be read; else that is raised.
        left_out: Takes, in sentences, which episodes do not count.

    Raises:
        TrajectoryFormatError: It cannot be read.
    """
    format_name = format_of(path).name
    if is_partial(path):
        if unfinished:
            yield _unfinished(path, path.parent, partial(_load_partial, path))
        else:
            left_out.append(f"{path}: the episode has not ended.")
    elif format_name == "json" and (fields := load_header(path)) is not None:
        yield _stored(path, fields, partial(EpisodeTrajectory.load, path))
    elif format_name == "jsonl":
        for episode in index_jsonl(path, problems=broken):
            if episode.fields is not None:
                yield _stored(path, episode.fields, partial(_load_jsonl, path, episode.offsets))
            elif unfinished:
                yield _unfinished(path, path, partial(_load_jsonl, path, episode.offsets, unfinished=True))
            else:
                left_out.append(f"{path}: episode {episode.head['episode_id']} has not ended.")
    elif format_name == "parquet":
        for place, head in parquet_headers(path):
            yield _stored(path, episode_fields(head), partial(_load_parquet, path, place))
    else:
        for number, trajectory in enumerate(format_of(path).read(path)):
            yield _stored(path, _fields(trajectory), partial(_load_nth, path, number))


def _unfinished(path: Path, locked: Path, read: Callable[[], EpisodeTrajectory]) -> StoredEpisode:
    fields = _fields(read())
    try:
        is_played = fields["outcome"] is Outcome.LOST and has_writer(locked)
    except OSError as error:
        raise TrajectoryFormatError(f"{path}: whether it is being written cannot be told: {error.strerror}.") from error
    if is_played:
        fields |= {"outcome": None, "error": None}
    return _stored(path, fields, read)


def _stored(path: Path, fields: Mapping[str, Any], read: Callable[[], EpisodeTrajectory]) -> StoredEpisode:
    header = {name: fields[name] for name in _HEADER}
    return StoredEpisode(path=path, _read=read, **{**header, "metadata": freeze(header["metadata"])})


def _fields(episode: EpisodeTrajectory) -> dict[str, Any]:
    return {name: getattr(episode, name) for name in _HEADER}


def _load_partial(path: Path) -> EpisodeTrajectory:
    try:
        return salvage_episode(path)[0]
    except TrajectoryFormatError:
        if path.exists() or not finished_path(path).exists():
            raise
    return _load_nth(finished_path(path), 0)  # it has ended meanwhile


def _load_jsonl(path: Path, offsets: Sequence[int], *, unfinished: bool = False) -> EpisodeTrajectory:
    return _nth(path, read_jsonl(path, offsets=offsets, problems=[] if unfinished else None), 0)


def _load_parquet(path: Path, place: RowPlace) -> EpisodeTrajectory:
    return _nth(path, read_parquet(path, start=place), 0)


def _load_nth(path: Path, number: int) -> EpisodeTrajectory:
    return _nth(path, format_of(path).read(path), number)


def _nth(path: Path, episodes: Iterator[EpisodeTrajectory], number: int) -> EpisodeTrajectory:
    if (episode := next(islice(episodes, number, None), None)) is None:
        raise TrajectoryFormatError(f"{path}: the episode is no longer there: the file has changed.")
    return episode
