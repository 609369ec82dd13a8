"""Episodes from any number of places, filtered, one after the other: the input of a conversion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ares_exp.errors import TrajectoryFormatError
from ares_exp.trajectories.episode_places import find_files, id_by_name, is_export
from ares_exp.trajectories.files.formats import Dropped, format_of
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episodes import load

SUCCESS = 1.0
"""Reward from which on an episode is a success, where no bounds are given."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which episodes are meant. An episode without a reward is outside of any bounds, and inside of none.

    Attributes:
        tasks: Names of tasks, or patterns such as `fix-*`; empty for all.
        outcomes: Names of outcomes; empty for all.
        min_reward, max_reward: Bounds of the total reward, themselves included; `None` for no bound.
        oracle: Whether episodes that the oracle played are, too.
        failed: Whether episodes with a reward below `SUCCESS` are, too, where no bounds are given.
    """

    tasks: Collection[str] = ()
    outcomes: Collection[str] = ()
    min_reward: float | None = None
    max_reward: float | None = None
    oracle: bool = True
    failed: bool = True

    def why_not(self, episode: EpisodeTrajectory) -> str | None:
        """Returns why an episode is not wanted, in words that follow "3 episodes"; `None` if it is."""
        if self.tasks and not any(fnmatchcase(episode.task_name, task) for task in self.tasks):
            return "of other tasks"
        if self.outcomes and episode.outcome not in self.outcomes:
            return f"that ended as {episode.outcome}"
        if not self.oracle and episode.is_of_oracle:
            return "played by the oracle (`--oracle` takes them, too)"
        if self.min_reward is None and self.max_reward is None and self.failed:
            return None
        if (reward := episode.total_reward) is None:
            return "without a reward"
        if self.min_reward is None and self.max_reward is None:
            return None if reward >= SUCCESS else f"with a reward below {SUCCESS:g} (`--failed` takes them, too)"
        low = self.min_reward is None or reward >= self.min_reward
        high = self.max_reward is None or reward <= self.max_reward
        return None if low and high else "with a reward outside the bounds"


@dataclass(slots=True)
class SelectedEpisodes:
    """The episodes of `places` that are wanted; to be iterated over once, and complete when that has ended.

    An episode that a run has in several formats counts once. No more than one episode is held in memory.

    Attributes:
        places: Files, folders and run directories.
        wanted: Which of their episodes are meant.
        tell: Is called with each problem, in a sentence, as soon as it is found; reading continues.
        read: How many episodes were read.
        left_out: How many of them, and of unfinished ones, were left out, by the reason.
        dropped: What of the files a trajectory could not hold.
        problems: How many things could not be read.
    """

    places: Sequence[Path]
    wanted: Wanted
    tell: Callable[[str], None]
    read: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    dropped: Dropped = field(default_factory=Counter)
    problems: int = 0

    def __iter__(self) -> Iterator[EpisodeTrajectory]:
        """Reads them.

        Raises:
            TrajectoryFormatError: There is no such place.
        """
        taken: set[str] = set()
        for files in [files for place in self.places for files in find_files(place)]:
            of_run: set[str] = set()
            for path in files:
                if id_by_name(path) not in of_run:  # else the same in another format: not to be opened
                    yield from self._of_file(path, of_run, taken)
            taken |= of_run

    def _of_file(self, path: Path, of_run: set[str], taken: set[str]) -> Iterator[EpisodeTrajectory]:
        for episode in self._readable(path):
            if episode.episode_id in of_run:
                continue
            of_run.add(episode.episode_id)
            self.read += 1
            if episode.num_steps != len(episode.steps):
                self._broken(f"{path}: expected {episode.num_steps} steps, got {len(episode.steps)}.")
            elif episode.episode_id in taken:
                self.left_out["with the id of another that was read before"] += 1
            elif reason := self.wanted.why_not(episode):
                self.left_out[reason] += 1
            else:
                yield episode

    def _readable(self, path: Path) -> Iterator[EpisodeTrajectory]:
        """Yields the episodes of a file that are not running; problems are reported."""
        try:
            if is_export(path):
                yield from format_of(path).read(path, dropped=self.dropped)
                return
            found = load(path, partial=True, skip_broken=True)
        except TrajectoryFormatError as error:
            self._broken(str(error))
            return
        for problem in found.left_out:
            self._broken(problem)
        for stored in found:
            if stored.outcome is None:
                self.left_out["that are running"] += 1
                continue
            try:
                yield stored.load()
            except TrajectoryFormatError as error:
                self._broken(str(error))

    def _broken(self, problem: str) -> None:
        self.problems += 1
        self.tell(problem)
