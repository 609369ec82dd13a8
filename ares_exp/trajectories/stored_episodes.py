"""Access to recorded episodes on disk. You can find, filter and load them. Steps are read only on request."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, overload

from ares_exp.errors import TrajectoryFormatError, UserError
from ares_exp.records.latest_run import MEANING
from ares_exp.records.results import ErrorInfo, Outcome, attempt_of
from ares_exp.records.run_dir import RUN_FILES, RUN_FOLDERS, SWEEP_RECORD, is_run
from ares_exp.records.terminal_text import count_of
from ares_exp.trajectories.files.episode_file import SHARED_SUFFIXES, find_episodes, find_headers, is_shared
from ares_exp.trajectories.files.line_file import ZSTD, has_writer
from ares_exp.trajectories.records import EpisodeTrajectory

logger = logging.getLogger(__name__)

Outcomes = str | Collection[str]


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """An episode on disk. `load` reads its steps. The object can be pickled, for the workers of a data loader.

    Attributes:
        path: The file that contains the episode.
        episode_id, task_name, total_reward, num_steps, start_time, end_time, error, metadata: Fields of
            `EpisodeTrajectory`.
        outcome: Outcome as in `EpisodeTrajectory`; `None` while the episode is running.
        step_count: Number of steps after FIRST, including an unfinished step, as in `EpisodeTrajectory`.
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
        """Reads the file, and returns the whole episode. Raises `TrajectoryFormatError` if the file is invalid."""
        return self._read()

    def row(self) -> dict[str, Any]:
        """Returns a row for a table. Strings, numbers and nulls in the metadata become columns `metadata.…`."""
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
    """Yields the episodes of a file without reading the steps of episodes that have ended.

    Args:
        path: The file.
        is_written: Whether a process is writing the file. If false, an episode without an end has the outcome `lost`.
        broken: See `problems` of `find_episodes`.

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
        raise TrajectoryFormatError(f"{path}: the episode is missing, because the file has changed.")
    return found.trajectory


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
    """Finds the episodes at `path`. Reads only their results and metadata. `StoredEpisode.load` reads the steps.

    ```
    for episode in load("outputs/first", task="fix-*", min_reward=1.0):
        print(episode.episode_id, episode.total_reward, len(episode.load().steps))
    ```

    Args:
        path: A run directory, a folder of runs (a sweep), a folder of episode files, or a single file of any format. An
            episode that a run stored in several formats is returned once.
        task: Name of the task, or a pattern such as `fix-*`.
        outcome: An outcome such as `completed`, or several outcomes.
        min_reward: Inclusive lower bound of the total reward. With a bound, episodes without a reward are excluded.
        max_reward: Inclusive upper bound of the total reward.
        partial: Whether running episodes are included. Their `outcome` is `None`.
        skip_broken: Whether an invalid file is skipped with a warning and listed in `left_out`. By default, it raises
            an error.
        cache: Cache of headers, for callers that load the same files repeatedly.

    Raises:
        TrajectoryFormatError: The path does not exist, or one of the files is invalid.
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
    """A cache of ended episodes without steps. An entry is valid until its file's size or modification time changes."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], tuple[StoredEpisode, ...]]] = {}

    def headers(self, path: Path, *, is_written: bool) -> tuple[StoredEpisode, ...]:
        """Returns the episode in a JSON file without its steps. Raises the same errors as `read_headers`."""
        found = path.stat()
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
    """Returns the episodes in `files`. If several files contain an episode, prefers the first file with its end."""
    found: dict[str, StoredEpisode] = {}
    written: dict[Path, bool] = {}
    for path in files:
        name = path.name.removesuffix(suffix_of(path) or "")  # the episode id, if the file has one episode
        if (known := found.get(name)) is not None and _has_ended(known):
            continue  # the same episode in another format
        try:
            locked = path if is_shared(path) else path.parent
            if locked not in written:
                written[locked] = has_writer(locked)
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
        except (TrajectoryFormatError, OSError) as error:
            if isinstance(error, OSError):
                error = TrajectoryFormatError(f"{path}: {error.strerror}.")
            if broken is None:
                raise error
            broken.append(str(error))
    return found.values()


class StoredEpisodes(Sequence[StoredEpisode]):
    """A sequence of episodes on disk, sorted by start time and id.

    Attributes:
        left_out: One sentence for each invalid file or running episode that was found but is not included.
    """

    def __init__(self, episodes: Iterable[StoredEpisode], *, left_out: Sequence[str] = ()) -> None:
        self._episodes = tuple(sorted(episodes, key=lambda episode: (episode.start_time, episode.episode_id)))
        self.left_out = tuple(left_out)

    @overload
    def __getitem__(self, index: int) -> StoredEpisode: ...
    @overload
    def __getitem__(self, index: slice) -> StoredEpisodes: ...
    def __getitem__(self, index: int | slice) -> StoredEpisode | StoredEpisodes:
        """Returns one episode, or the episodes of a slice."""
        if isinstance(index, slice):
            return StoredEpisodes(self._episodes[index], left_out=self.left_out)
        return self._episodes[index]

    def __len__(self) -> int:
        return len(self._episodes)

    def __repr__(self) -> str:
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
        """Returns the episodes that match all given conditions.

        Args:
            task: Name of the task, or a pattern, as in `load`.
            outcome: An outcome, or several outcomes.
            min_reward: Inclusive lower bound of the total reward.
            max_reward: Inclusive upper bound of the total reward.
            where: Any other condition, as a function: `lambda episode: episode.metadata.get("seed") == 3`.

        Raises:
            ValueError: The outcome is unknown.
        """
        wanted = None if outcome is None else {outcome} if isinstance(outcome, str) else set(outcome)
        if unknown := sorted((wanted or set()) - set(Outcome)):
            raise ValueError(f"There is no outcome {unknown[0]!r}. Use one of {', '.join(Outcome)}.")
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
        """Yields the loaded episodes. Only one episode is in memory at a time, unless you keep them.

        Args:
            skip_broken: Whether an episode that cannot be loaded is skipped with a warning.

        Raises:
            TrajectoryFormatError: An episode cannot be loaded.
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
        """Returns one row per episode, as for `pandas.DataFrame(load("outputs/first").rows())`."""
        return [episode.row() for episode in self]


SUFFIXES = (".json", f".json{ZSTD}", *SHARED_SUFFIXES)
"""Suffixes of episode files."""

MAX_DEPTH = 4
"""Maximum number of directory levels below a folder in which runs are searched."""


def find_files(path: Path) -> list[list[Path]]:
    """Finds the episode files at `path`.

    Returns:
        One list for each run, and one list of the files that are directly in the folder `path`. If several files
        contain the same episode, the preferred file comes first (see `_in_order`).

    Raises:
        TrajectoryFormatError: The path does not exist or cannot be read.
    """
    try:
        if path.is_file():
            if suffix_of(path) is None:
                raise TrajectoryFormatError(
                    f"{path}: expected the name of an episode file to end with one of {', '.join(SUFFIXES)}."
                )
            return [[path]]
        if path.exists() and not path.is_dir():
            raise TrajectoryFormatError(f"{path}: expected a file or a folder, but it is a pipe or a device.")
        if is_run(path):
            return [_in_run(path)]
        own = [] if (path / SWEEP_RECORD).is_file() else _in_folder(path)  # JSON files of a sweep are not episodes
        return [_in_order(own), *(_in_run(run) for run in runs_below(path, MAX_DEPTH))]
    except OSError as error:
        raise TrajectoryFormatError(f"{error.filename or path}: {error.strerror}.") from error


def suffix_of(path: Path) -> str | None:
    """Returns the suffix that identifies the format of a file, such as `.json.zst`; `None` for an unknown format."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix) and path.name != suffix), None)


def runs_below(folder: Path, depth: int, seen: set[Path] | None = None) -> Iterator[Path]:
    """Yields the run directories at most `depth` levels below a folder, sorted by name.

    `seen` contains directories that are skipped. All visited directories are added, so that links do not cause
    duplicates.
    """
    seen = set() if seen is None else seen
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."):
        below = (folder / name).resolve()
        if below in seen:
            continue
        seen.add(below)
        if is_run(below):
            yield folder / name
        elif depth > 1:
            yield from runs_below(folder / name, depth - 1, seen)


def _in_run(run: Path) -> list[Path]:
    files = [path for path in map(run.joinpath, RUN_FILES) if path.is_file()]
    for folder in map(run.joinpath, RUN_FOLDERS):
        files += _in_folder(folder) if folder.is_dir() else []
    return _in_order(files)


def _in_folder(folder: Path) -> list[Path]:
    names = (entry.name for entry in os.scandir(folder) if entry.name[0] != "." and entry.is_file())
    return [path for path in map(folder.joinpath, names) if suffix_of(path) is not None]


def _in_order(files: list[Path]) -> list[Path]:
    """Sorts files so that, if a run stored an episode in several formats, the preferred file comes first.

    The order is: compressed JSON files, other JSON files, compressed JSON Lines files, other JSON Lines files.
    Compressed files are preferred, because they are always complete.
    """
    return sorted(files, key=lambda path: (is_shared(path), path.suffix != ZSTD, path))


HELP = f"a file or run directory, optionally with /ID or the start of an id (TASK__1 is attempt 1); {MEANING}"


def chosen_episodes(path: Path) -> StoredEpisodes:
    """Finds the episodes at a path from the command line, such as `RUN` or `RUN/TASK`.

    If the path does not exist, its last part is used as the start of an episode id.

    Raises:
        TrajectoryFormatError: The path does not exist, or a requested file is invalid.
        UserError: No episode id starts with this prefix.
    """
    here = path.parent == Path() and not is_run(path.parent)  # a mistyped name must not search the working directory
    if path.exists() or not path.parent.exists() or path.parent == path or here:
        return load(path, partial=True, skip_broken=path.is_dir())
    episodes, prefix = load(path.parent, partial=True, skip_broken=True), path.name
    found = episodes.filter(where=lambda episode: episode.episode_id.startswith(prefix))
    if len(exact := found.filter(where=lambda episode: episode.episode_id == prefix)) == 1:
        return exact
    if whole := found.filter(where=lambda episode: episode.episode_id.startswith(f"{prefix}__")):
        return whole  # `TASK__1` means attempt 1, but not attempt 10
    if not found:
        broken = next((problem for problem in episodes.left_out if f"/{prefix}" in problem), None)
        raise UserError(
            broken
            or f"Expected a file, a folder or an episode, got {path}: this file does not exist, and none of "
            f"the {len(episodes)} episodes in {path.parent} has an id that starts with {prefix!r}."
        )
    return found


def chosen_episode(path: Path) -> StoredEpisode:
    """Finds the one episode at a path from the command line. If the attempt was retried, returns its latest episode.

    Raises:
        UserError: The run has no such episode, or has episodes of several attempts.
    """
    episodes = chosen_episodes(path)
    if len({attempt_of(episode.episode_id) for episode in episodes}) == 1:
        return max(episodes, key=lambda episode: episode.start_time)
    if not episodes:
        left_out = f" Left out: {episodes.left_out[0]}" if episodes.left_out else ""
        raise UserError(f"There is no episode in {path}.{left_out}")
    raise UserError(
        f"Expected one episode, found {len(episodes)} in {path}. Name one, such as {path_of_one(path, episodes)}. "
        f"`ares-exp show {path}` lists them."
    )


def path_of_one(path: Path, episodes: StoredEpisodes) -> Path:
    """Returns a path for the command line that selects only the first of the `episodes` found at `path`."""
    return (path if path.exists() else path.parent) / episodes[0].episode_id
