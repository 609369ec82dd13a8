"""Curricula: random choice of tasks by the pass rates of earlier attempts, and detection of useless groups."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ares_exp.errors import ConfigError

Weighting = Literal["uniform", "learnability", "difficulty"]
"""Weight of a task with the pass rate p: equal for all tasks (`uniform`), p · (1 - p) (`learnability`), or 1 - p
(`difficulty`)."""
ZeroStdGroups = Literal["keep", "drop", "refill"]
"""Treatment of groups whose attempts all have the same reward: `keep` trains on them, `drop` does not, and `refill`
runs other groups instead."""

SAME_REWARD = 1e-9
"""Rewards that differ by less count as equal."""


class Curriculum:
    """Draws tasks with weights that depend on their pass rates.

    The pass rate of a task starts at one half, as if the task had passed once and failed once. With `decay`, older
    attempts count less.
    """

    def __init__(
        self,
        task_names: Sequence[str],
        *,
        weighting: Weighting = "uniform",
        least: float = 0.05,
        decay: float = 0.9,
        threshold: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Stores the arguments.

        Args:
            task_names: The tasks to draw from.
            weighting: Definition of a task's weight.
            least: Minimum weight, so that every task can be drawn.
            decay: Factor by which each new group reduces the weight of earlier attempts at the same task.
            threshold: Minimum reward of an attempt that passes.
            seed: Seed of the draws. The same seed and step give the same draw.

        Raises:
            ConfigError: `task_names` is empty.
        """
        if not task_names:
            raise ConfigError(
                "Expected at least one task to train on, got none: all are held out, or none is selected."
            )
        self._weighting = weighting
        self._least = least
        self._decay = decay
        self._threshold = threshold
        self._seed = seed
        self._seen = dict.fromkeys(task_names, (0.0, 0.0))

    def pass_rate(self, task_name: str) -> float:
        """Returns the estimated pass rate of a task."""
        passed, ran = self._seen[task_name]
        return (passed + 1) / (ran + 2)

    def weight(self, task_name: str) -> float:
        """Returns the weight with which a task is drawn."""
        rate = self.pass_rate(task_name)
        weights = {"uniform": 1.0, "learnability": rate * (1 - rate), "difficulty": 1 - rate}
        return max(weights[self._weighting], self._least)

    def draw(self, n: int, *, step: int, part: int = 0) -> list[str]:
        """Draws tasks. No task is drawn again before every task was drawn.

        Args:
            n: Number of tasks.
            step: Optimizer step that trains on these tasks.
            part: Number of earlier draws for the same step.
        """
        chance = random.Random(f"{self._seed}/{step}/{part}")
        drawn: list[str] = []
        left: dict[str, float] = {}
        for _ in range(n):
            left = left or {name: self.weight(name) for name in self._seen}
            [name] = chance.choices([*left], weights=[*left.values()])
            del left[name]
            drawn.append(name)
        return drawn

    def add(self, task_name: str, rewards: Sequence[float]) -> None:
        """Updates the pass rate of a task with the rewards of a group of attempts."""
        passed, ran = self._seen[task_name]
        new = sum(reward >= self._threshold for reward in rewards)
        self._seen[task_name] = passed * self._decay + new, ran * self._decay + len(rewards)

    def state(self) -> dict[str, list[float]]:
        """Returns the weighted numbers of passed attempts and of all attempts at each task, JSON-ready."""
        return {name: [*seen] for name, seen in self._seen.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of an earlier session. Ignores tasks that no longer exist."""
        for name, seen in state.items():
            if name in self._seen:
                passed, ran = seen
                self._seen[name] = float(passed), float(ran)


def teaches_nothing(rewards: Sequence[float]) -> bool:
    """Checks whether all rewards of a group are equal, so that no attempt is better than the others."""
    return not rewards or max(rewards) - min(rewards) < SAME_REWARD
