"""The plan: which (task, attempt) pairs are owed, and the seed of each."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """One episode that is owed.

    Attributes:
        episode_id: Unique; usable as a file name.
        task_name: The task.
        attempt: Number of this playing of the task, from 0.
        seed: Derived from the run's seed, the task's name and the attempt, so that it depends on nothing else.
    """

    episode_id: str
    task_name: str
    attempt: int
    seed: int


def plan_episodes(task_names: Sequence[str], *, attempts: int, seed: int) -> list[PlannedEpisode]:
    """Every task `attempts` times, attempts outermost: a run cut short has played as many tasks as it could."""
    return [_planned(name, attempt, seed) for attempt in range(attempts) for name in task_names]


def _planned(task_name: str, attempt: int, seed: int) -> PlannedEpisode:
    slug = re.sub(r"[^A-Za-z0-9._-]", "-", task_name)[:80]
    episode_id = f"{slug}__{attempt}__{uuid.uuid4().hex[:8]}"
    return PlannedEpisode(episode_id, task_name, attempt, episode_seed(seed, task_name, attempt))


def episode_seed(seed: int, task_name: str, attempt: int) -> int:
    """A seed in [0, 2**31) that is the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{task_name}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
