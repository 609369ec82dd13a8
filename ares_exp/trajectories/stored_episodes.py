"""Recorded episodes on disk: found, filtered and loaded one at a time, their steps left in the files until then."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, overload

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.records.terminal_text import count_of
from ares_exp.trajectories.episode_places import find_files, id_by_name
from ares_exp.trajectories.files.episode_file import find_episodes, find_headers, is_shared
from ares_exp.trajectories.files.writer_lock import has_writer
from ares_exp.trajectories.records import EpisodeTrajectory

logger = logging.getLogger(__name__)

Outcomes = str | Collection[str]


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """One episode, its steps left on disk. Can be pickled, for the workers of a data loader.

    Attributes:
        path: The file that has it.
        episode_id, task_name, total_reward, num_steps, start_time, end_time, error, metadata: As in
            `EpisodeTrajectory`.
        outcome: As there; `None` while it is running.
        step_count: Number of steps after FIRST, one that raised included, as in `EpisodeTrajectory`.
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
    step_count: int
    _read: Callable[[], EpisodeTrajectory] = field(repr=False, compare=False)

    def load(self) -> EpisodeTrajectory:
        """Reads all of it; nothing is kept here.

        Raises:
            TrajectoryFormatError: The file is broken; the message names the path and the place.
        """
        return self._read()

    def row(self) -> dict[str, Any]:
        """Returns one row of a table: plain values, one a column; `metadata.…` has the plain ones of the metadata."""
        row: dict[str, Any] = {name: getattr(self, name) for name in _COLUMNS}
        row["outcome"] = None if self.outcome is None else self.outcome.value
        row["duration_sec"] = self.end_time - self.start_time
        row["error_type"] = None if self.error is None else self.error.type
        row["error_message"] = None if self.error is None else self.error.message
        plain = {key: value for key, value in self.metadata.items() if isinstance(value, str | int | float | None)}
        return {**row, "path": str(self.path), **{f"metadata.{key}": value for key, value in plain.items()}}


_COLUMNS = ("episode_id", "task_name", "outcome", "total_reward", "num_steps", "start_time", "end_time")
_HEADER = (*_COLUMNS, "error", "metadata")


def read_headers(path: Path, *, is_written: bool, broken: list[str] | None) -> Iterator[StoredEpisode]:
    """Yields the episodes of a file. The steps of those that have ended are not read.

    Args:
        path: The file, a record.
        is_written: Whether a process was writing there before this call: an episode without an end is running then,
            and lost otherwise.
        broken: Takes a sentence for each broken record of a file whose other records can be read. By default the first
            is raised.

    Raises:
        TrajectoryFormatError: The file cannot be read.
    """
    for found in find_headers(path, problems=broken):
        offsets = found.offsets if is_shared(path) else None
        header = found.ended
        if header is None:
            read = [found] if offsets is None else find_episodes(path, offsets=offsets, problems=broken)
            header = next(iter(read)).trajectory
        stored = StoredEpisode(
            path=path,
            _read=partial(_load, path, offsets),
            step_count=header.step_count,
            **{name: getattr(header, name) for name in _HEADER},
        )
        is_running = is_written and found.ended is None
        yield replace(stored, outcome=None, error=None) if is_running else stored


def _load(path: Path, offsets: Sequence[int] | None) -> EpisodeTrajectory:
    found = next(find_episodes(path, offsets=offsets), None)
    if found is None:
        raise TrajectoryFormatError(f"{path}: the episode is missing: the file has changed.")
    return found.trajectory


def _is_written(place: Path) -> bool:
    try:
        return has_writer(place)
    except OSError as error:
        raise TrajectoryFormatError(f"{place}: cannot tell whether it is being written: {error.strerror}.") from error


def load(
    path: str | Path,
    *,
    task: str | None = None,
    outcome: Outcomes | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    partial: bool = False,
    skip_broken: bool = False,
    cache: HeaderCache | None = None,
) -> StoredEpisodes:
    """Finds the episodes at `path` and reads their headers; steps are read when they are asked for.

    ```
    for episode in load("outputs/first", task="fix-*", min_reward=1.0):
        print(episode.episode_id, episode.total_reward, len(episode.load().steps))
    ```

    Args:
        path: A run directory, a folder of runs (a sweep), a folder of episode files, or a file, of any format. An
            episode that a run has in several formats counts once.
        task: The task's name, or a pattern such as `fix-*`.
        outcome: An outcome, or several.
        min_reward: Lower bound of the total reward, itself included. An episode without a reward is within none.
        max_reward: Upper bound of it, likewise.
        partial: Whether running episodes are included. Their `outcome` is `None`.
        skip_broken: Whether a broken file is left out, with a warning, and `left_out` tells; by default it is an error.
        cache: Headers that were read before, for who asks again and again.

    Raises:
        TrajectoryFormatError: There is no such path, or something there is broken.
    """
    place = Path(path)
    found: list[StoredEpisode] = []
    broken: list[str] | None = [] if skip_broken else None
    left_out: list[str] = []
    for files in find_files(place):
        found += _of_one_run(files, cache, running=partial, broken=broken, left_out=left_out)
    for problem in broken or ():
        logger.warning("Left out: %s", problem)
    episodes = StoredEpisodes(found, left_out=[*(broken or ()), *left_out])
    return episodes.filter(task=task, outcome=outcome, min_reward=min_reward, max_reward=max_reward)


class HeaderCache:
    """Headers of episodes that have ended, kept while the time and size of their file stay the same."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], tuple[StoredEpisode, ...]]] = {}

    def headers(self, path: Path, *, is_written: bool) -> tuple[StoredEpisode, ...]:
        """Returns the episode of a JSON file. Raises as `read_headers` does."""
        try:
            found = path.stat()
        except OSError as error:
            raise TrajectoryFormatError(f"{path}: {error.strerror}.") from error
        stamp = found.st_mtime_ns, found.st_size
        if (known := self._known.get(path)) is None or known[0] != stamp:
            known = stamp, tuple(read_headers(path, is_written=is_written, broken=None))
            if all(map(_has_ended, known[1])):
                self._known[path] = known
        return known[1]


def _has_ended(episode: StoredEpisode) -> bool:
    return episode.outcome not in (None, Outcome.LOST)


def _of_one_run(
    files: Sequence[Path], cache: HeaderCache | None, *, running: bool, broken: list[str] | None, left_out: list[str]
) -> Iterable[StoredEpisode]:
    """Returns the episodes of these files; of those with the same id the first that has ended, or the first."""
    found: dict[str, StoredEpisode] = {}
    written: dict[Path, bool] = {}
    for path in files:
        if (known := found.get(id_by_name(path))) is not None and _has_ended(known):
            continue  # the same in another format: its file need not be opened
        try:
            locked = path if is_shared(path) else path.parent
            if locked not in written:
                written[locked] = _is_written(locked)
            if cache is not None and not is_shared(path):
                episodes: Iterable[StoredEpisode] = cache.headers(path, is_written=written[locked])
            else:
                episodes = read_headers(path, is_written=written[locked], broken=broken)
            for episode in episodes:
                known = found.get(episode.episode_id)
                if episode.outcome is None and not running:
                    left_out.append(f"{path}: episode {episode.episode_id} has not ended.")
                elif known is None or (_has_ended(episode) and not _has_ended(known)):
                    found[episode.episode_id] = episode
        except TrajectoryFormatError as error:
            if broken is None:
                raise
            broken.append(str(error))
    return found.values()


class StoredEpisodes(Sequence[StoredEpisode]):
    """Episodes on disk, in the order in which they started (and of their ids).

    Attributes:
        left_out: What was found beside them and is not among them, in sentences: broken files, unfinished episodes.
    """

    def __init__(self, episodes: Iterable[StoredEpisode], *, left_out: Sequence[str] = ()) -> None:
        """Sorts them by their start."""
        self._episodes = tuple(sorted(episodes, key=lambda episode: (episode.start_time, episode.episode_id)))
        self.left_out = tuple(left_out)

    @overload
    def __getitem__(self, index: int) -> StoredEpisode: ...
    @overload
    def __getitem__(self, index: slice) -> StoredEpisodes: ...
    def __getitem__(self, index: int | slice) -> StoredEpisode | StoredEpisodes:
        """Returns one of them, or those of a slice."""
        if isinstance(index, slice):
            return StoredEpisodes(self._episodes[index], left_out=self.left_out)
        return self._episodes[index]

    def __len__(self) -> int:
        """Returns how many there are."""
        return len(self._episodes)

    def __repr__(self) -> str:
        """Returns how many there are, of how many tasks."""
        tasks = len({episode.task_name for episode in self})
        return f"<{count_of(len(self), 'episode')} of {count_of(tasks, 'task')}>"

    def filter(
        self,
        *,
        task: str | None = None,
        outcome: Outcomes | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        where: Callable[[StoredEpisode], bool] | None = None,
    ) -> StoredEpisodes:
        """Returns those that meet every condition given.

        Args:
            task: The task's name, or a pattern such as `fix-*`.
            outcome: An outcome, or several.
            min_reward: Lower bound of the total reward, itself included. An episode without a reward is within none.
            max_reward: Upper bound of it, likewise.
            where: Any other condition, e.g. `lambda episode: episode.metadata.get("seed") == 3`.

        Raises:
            ValueError: There is no such outcome.
        """
        wanted = None if outcome is None else _outcomes(outcome)
        low, high = -math.inf if min_reward is None else min_reward, math.inf if max_reward is None else max_reward
        bounded = min_reward is not None or max_reward is not None

        def meets(episode: StoredEpisode) -> bool:
            reward = episode.total_reward
            return (
                (task is None or fnmatchcase(episode.task_name, task))
                and (wanted is None or episode.outcome in wanted)
                and (not bounded or (reward is not None and low <= reward <= high))
                and (where is None or where(episode))
            )

        return StoredEpisodes(filter(meets, self._episodes), left_out=self.left_out)

    def trajectories(self, *, skip_broken: bool = False) -> Iterator[EpisodeTrajectory]:
        """Loads them one after the other; none is kept in memory.

        Args:
            skip_broken: Whether an episode that cannot be loaded is passed over, with a warning.

        Raises:
            TrajectoryFormatError: One cannot be loaded.
        """
        for episode in self:
            try:
                trajectory = episode.load()
            except TrajectoryFormatError as error:
                if not skip_broken:
                    raise
                logger.warning("Left out: %s", error)
            else:
                yield trajectory

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each, for a table: `pandas.DataFrame(load("outputs/first").rows())`."""
        return [episode.row() for episode in self]


def _outcomes(names: Outcomes) -> frozenset[str]:
    wanted = {names} if isinstance(names, str) else set(names)
    if unknown := sorted(wanted - set(Outcome)):
        raise ValueError(f"Expected an outcome, got {unknown[0]!r}. There are: {', '.join(Outcome)}.")
    return frozenset(wanted)
