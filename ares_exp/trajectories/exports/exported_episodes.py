"""The episodes that an export selects, and the reasons why it excludes others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ares_exp.errors import TrajectoryFormatError
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episodes import StoredEpisode, load


@dataclass(slots=True)
class ExportedEpisodes:
    """The episodes of `run` that match the filters. Can be iterated once, and keeps only one episode in memory.

    If a run was killed, its running episodes have the outcome `lost` and contain the steps that were recorded. If a
    file cannot be read, the error is added to `problems`, and the iteration continues.

    Attributes:
        run: A run directory, a folder of runs, or a file of episodes.
        tasks: Names of tasks, or patterns such as `fix-*`; empty for all tasks.
        outcomes: Names of outcomes; empty for all outcomes.
        min_reward, max_reward: Inclusive bounds on the total reward; `None` for no bound. With a bound, episodes
            without a reward are excluded.
        oracle: Whether episodes with responses of `policy=oracle` are included.
        count: Number of episodes yielded so far.
        left_out: Number of excluded episodes by reason, as in `{"episodes without a reward": 3}`.
        problems: One sentence for each unreadable file or record, with the file and the position.
    """

    run: Path
    tasks: Collection[str] = ()
    outcomes: Collection[str] = ()
    min_reward: float | None = None
    max_reward: float | None = None
    oracle: bool = True
    count: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[EpisodeTrajectory]:
        """Yields the episodes in order of their start. Raises `TrajectoryFormatError` if `run` does not exist."""
        found = load(self.run, partial=True, skip_broken=True)
        self.problems += found.left_out
        seen: set[str] = set()
        for stored in found:
            reason = "with the id of an earlier episode" if stored.episode_id in seen else self._why_not(stored)
            seen.add(stored.episode_id)
            if reason is None:
                try:
                    episode = stored.load()
                except TrajectoryFormatError as error:
                    self.problems.append(str(error))
                    continue
                if self.oracle or not episode.is_of_oracle:
                    self.count += 1
                    yield episode
                    continue
                reason = "of the oracle (`--oracle` includes them)"
            self.left_out[f"episodes {reason}"] += 1

    def _why_not(self, episode: StoredEpisode) -> str | None:
        """Returns the reason for excluding an episode, such as "without a reward"; `None` if the filters match."""
        reward = episode.total_reward
        if self.tasks and not any(fnmatchcase(episode.task_name, task) for task in self.tasks):
            return "of other tasks"
        if episode.outcome is None:
            return "still running"
        if self.outcomes and episode.outcome not in self.outcomes:
            return f"with the outcome {episode.outcome}"
        if reward is None:
            return "without a reward" if (self.min_reward, self.max_reward) != (None, None) else None
        if self.min_reward is not None and reward < self.min_reward:
            return f"with a reward below {self.min_reward:g}"
        if self.max_reward is not None and reward > self.max_reward:
            return f"with a reward above {self.max_reward:g}"
        return None
