"""The plan: the (task, attempt) pairs that are still to be played, and the seed of each."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from ares_exp.trajectories.answer_log import LoggedEpisode


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """One planned try of an attempt.

    Attributes:
        episode_id: Unique; usable as a file name.
        task_name: The task.
        attempt: Number of the attempt at the task, from 0.
        seed: Derived from the run's seed, the task's name, the attempt and the try, so that it depends on nothing else.
        retry: Number of earlier tries of the attempt.
        earlier: The try whose answers are given again; `None` for a start from the start.
        use_snapshots: Whether it may continue from a snapshot of the earlier try.
    """

    episode_id: str
    task_name: str
    attempt: int
    seed: int
    retry: int = 0
    earlier: LoggedEpisode | None = field(default=None, repr=False)
    use_snapshots: bool = True

    @property
    def slot(self) -> tuple[str, int]:
        """The attempt: task and number."""
        return self.task_name, self.attempt

    def going_on(self, earlier: LoggedEpisode, *, retry: int, use_snapshots: bool = True) -> Self:
        """Plans a try that continues with the answers of an earlier one and shares its seed."""
        again = self.anew(retry=retry, seed=earlier.seed)
        return replace(again, earlier=earlier, use_snapshots=use_snapshots)

    def anew(self, *, retry: int, seed: int) -> Self:
        """Plans a try that starts from the start, after one that failed or was lost."""
        return replace(self, episode_id=_new_id(*self.slot), seed=seed, retry=retry, earlier=None)


def plan_episodes(task_names: Sequence[str], *, attempts: int, seed: int) -> list[PlannedEpisode]:
    """Plans every task `attempts` times, attempts outermost: an interrupted run has played many tasks at least once."""
    return [plan_attempt(name, attempt, seed=seed) for attempt in range(attempts) for name in task_names]


def plan_attempt(task_name: str, attempt: int, *, seed: int) -> PlannedEpisode:
    """Plans one attempt, with its seed derived from that of the run."""
    return PlannedEpisode(_new_id(task_name, attempt), task_name, attempt, episode_seed(seed, task_name, attempt))


def _new_id(task_name: str, attempt: int) -> str:
    slug = re.sub(r"[^A-Za-z0-9._-]", "-", task_name)[:80]
    return f"{slug}__{attempt}__{uuid.uuid4().hex[:8]}"


def episode_seed(seed: int, task_name: str, attempt: int, retry: int = 0) -> int:
    """Derives a seed in [0, 2**31) that is the same on every machine."""
    name = f"{seed}/{task_name}/{attempt}" + (f"/{retry}" if retry else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
