"""The episodes of runs, to be read: found, filtered and iterated over without holding them all in memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, overload

from ares_exp.errors import TrajectoryFormatError
from ares_exp.results import Outcome
from ares_exp.trajectories.episode_places import find_files, finished_path, is_partial
from ares_exp.trajectories.files.formats import suffix_of
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episode import StoredEpisode, read_headers

logger = logging.getLogger(__name__)

Outcomes = str | Collection[str]


def load(
    path: str | Path,
    *,
    task: str | None = None,
    outcome: Outcomes | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    partial: bool = False,
    skip_broken: bool = False,
) -> StoredEpisodes:
    """Finds the episodes at `path` and reads what is said of each; the steps are read when they are asked for.

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
        partial: Whether episodes that have not ended count too: being played (`outcome` is `None`) or lost.
        skip_broken: Whether a broken file is left out, with a warning, and `left_out` tells; by default it is an error.

    Raises:
        TrajectoryFormatError: There is no such path, or something there is broken.
    """
    place = Path(path)
    found: list[StoredEpisode] = []
    broken: list[str] | None = [] if skip_broken else None
    left_out: list[str] = []
    for files in find_files(place):
        found += _of_one_run(files, partial=partial or is_partial(place), broken=broken, left_out=left_out)
    for problem in broken or ():
        logger.warning("Left out: %s", problem)
    episodes = StoredEpisodes(found, left_out=[*(broken or ()), *left_out])
    return episodes.filter(task=task, outcome=outcome, min_reward=min_reward, max_reward=max_reward)


def _of_one_run(
    files: Sequence[Path], *, partial: bool, broken: list[str] | None, left_out: list[str]
) -> Iterable[StoredEpisode]:
    """The episodes of these files; of those with the same id the first."""
    found: dict[str, StoredEpisode] = {}
    for path in files:
        if finished_path(path).name.removesuffix(suffix_of(path) or "") in found:
            continue  # the same in another format: its file need not be opened
        try:
            for episode in read_headers(path, unfinished=partial, broken=broken, left_out=left_out):
                found.setdefault(episode.episode_id, episode)
        except TrajectoryFormatError as error:
            if broken is None:
                raise
            broken.append(str(error))
    return found.values()


class StoredEpisodes(Sequence[StoredEpisode]):
    """Episodes on disk, in the order in which they began (and of their ids).

    Attributes:
        left_out: What was found beside them and is not among them, in sentences: broken files, unfinished episodes.
    """

    def __init__(self, episodes: Iterable[StoredEpisode], *, left_out: Sequence[str] = ()) -> None:
        """Puts them in order."""
        self._episodes = tuple(sorted(episodes, key=lambda episode: (episode.start_time, episode.episode_id)))
        self.left_out = tuple(left_out)

    @overload
    def __getitem__(self, index: int) -> StoredEpisode: ...
    @overload
    def __getitem__(self, index: slice) -> StoredEpisodes: ...
    def __getitem__(self, index: int | slice) -> StoredEpisode | StoredEpisodes:
        """One of them, or as many as a slice has."""
        if isinstance(index, slice):
            return StoredEpisodes(self._episodes[index], left_out=self.left_out)
        return self._episodes[index]

    def __len__(self) -> int:
        """How many they are."""
        return len(self._episodes)

    def __repr__(self) -> str:
        """How many they are, of how many tasks."""
        return f"<{len(self)} episodes of {len({episode.task_name for episode in self})} tasks>"

    def filter(
        self,
        *,
        task: str | None = None,
        outcome: Outcomes | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        where: Callable[[StoredEpisode], bool] | None = None,
    ) -> StoredEpisodes:
        """Those that meet every condition given.

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
        """A row for each, to make a table of: `pandas.DataFrame(load("outputs/first").rows())`."""
        return [episode.row() for episode in self]


def _outcomes(names: Outcomes) -> frozenset[str]:
    wanted = {names} if isinstance(names, str) else set(names)
    if unknown := sorted(wanted - set(Outcome)):
        raise ValueError(f"Expected an outcome, got {unknown[0]!r}. There are: {', '.join(Outcome)}.")
    return frozenset(wanted)
