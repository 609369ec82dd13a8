"""Episodes from any number of places, filtered, one after the other: the input of a conversion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ares_exp.errors import TrajectoryFormatError
from ares_exp.trajectories.episode_places import find_files, id_by_name, is_partial
from ares_exp.trajectories.files.formats import Dropped, format_of, suffix_of
from ares_exp.trajectories.files.jsonl_file import read_jsonl
from ares_exp.trajectories.files.jsonl_index import index_jsonl
from ares_exp.trajectories.records import EpisodeTrajectory

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
class _Run:
    """Ids of the episodes of one run."""

    finished: set[str] = field(default_factory=set)
    unfinished: set[str] = field(default_factory=set)


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
            run = _Run()
            for path in files:
                if is_partial(path):
                    self._leave_unfinished(path, run)
                elif id_by_name(path) not in run.finished:  # else the same in another format: not to be opened
                    yield from self._of_file(path, run, taken)
            if unfinished := run.unfinished - run.finished:
                self.left_out["that have not ended (`recover` ends those of dead processes)"] += len(unfinished)
            taken |= run.finished

    def _of_file(self, path: Path, run: _Run, taken: set[str]) -> Iterator[EpisodeTrajectory]:
        for episode in self._whole(path, run):
            if episode.episode_id in run.finished:
                continue
            run.finished.add(episode.episode_id)
            self.read += 1
            if episode.num_steps != len(episode.steps):
                self._broken(f"{path}: expected {episode.num_steps} steps, got {len(episode.steps)}.")
            elif episode.episode_id in taken:
                self.left_out["with the id of another that was read before"] += 1
            elif reason := self.wanted.why_not(episode):
                self.left_out[reason] += 1
            else:
                yield episode

    def _whole(self, path: Path, run: _Run) -> Iterator[EpisodeTrajectory]:
        """Yields the finished episodes of a file; problems are reported."""
        try:
            if suffix_of(path) == ".jsonl":  # of a run, maybe one under way: episodes without an end are no error
                yield from self._whole_lines(path, run)
            else:
                yield from format_of(path).read(path, dropped=self.dropped)
        except TrajectoryFormatError as error:
            self._broken(str(error))

    def _whole_lines(self, path: Path, run: _Run) -> Iterator[EpisodeTrajectory]:
        problems: list[str] = []
        for found in index_jsonl(path, problems=problems):
            if found.header is None:
                run.unfinished.add(found.head["episode_id"])
                continue
            try:
                yield from read_jsonl(path, offsets=found.offsets)
            except TrajectoryFormatError as error:
                self._broken(str(error))
        for problem in problems:
            self._broken(problem)

    def _leave_unfinished(self, path: Path, run: _Run) -> None:
        if path in self.places:
            recover = f"`ares-exp recover {path}` ends it if the process that played it has died."
            self._broken(f"{path}: the episode has not ended. {recover}")
        else:
            run.unfinished.add(id_by_name(path))

    def _broken(self, problem: str) -> None:
        self.problems += 1
        self.tell(problem)
