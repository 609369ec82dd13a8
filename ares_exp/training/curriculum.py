"""Curricula: the draw of the next tasks by pass rates of earlier attempts, and which groups teach something."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ares_exp.errors import ConfigError

Weighting = Literal["uniform", "learnability", "difficulty"]
"""What a task's weight is, of its pass rate p: the same for all; p · (1 - p); or 1 - p."""
ZeroStdGroups = Literal["keep", "drop", "refill"]
"""What becomes of a group whose attempts all have the same reward: kept; not trained on; another in its place."""

SAME_REWARD = 1e-9
"""Rewards that differ by less are the same."""


class Curriculum:
    """Draws tasks by weights that follow their pass rates.

    The pass rate of a task starts at one half, as if it had passed once and failed once; with `decay`, what is long ago
    counts less.
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
        """Keeps the arguments.

        Args:
            task_names: The tasks to draw from.
            weighting: What the weight of a task is.
            least: The least weight, so that no task is forgotten.
            decay: What the earlier attempts at a task are multiplied by with each further group.
            threshold: Reward from which on an attempt has passed.
            seed: Of the draws; with the step, it decides them.

        Raises:
            ConfigError: There is no task.
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
        """Returns the pass rate of a task as far as it is known."""
        passed, ran = self._seen[task_name]
        return (passed + 1) / (ran + 2)

    def weight(self, task_name: str) -> float:
        """Returns the weight with which a task is drawn."""
        rate = self.pass_rate(task_name)
        weights = {"uniform": 1.0, "learnability": rate * (1 - rate), "difficulty": 1 - rate}
        return max(weights[self._weighting], self._least)

    def draw(self, n: int, *, step: int, part: int = 0) -> list[str]:
        """Draws tasks, none twice before each was drawn once.

        Args:
            n: How many.
            step: The optimizer step that they are for.
            part: Number of earlier draws for it.
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
        """Counts the outcomes of a group of attempts at a task."""
        passed, ran = self._seen[task_name]
        new = sum(reward >= self._threshold for reward in rewards)
        self._seen[task_name] = passed * self._decay + new, ran * self._decay + len(rewards)

    def state(self) -> dict[str, list[float]]:
        """Returns what is known of the tasks, JSON-ready."""
        return {name: [*seen] for name, seen in self._seen.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what an earlier session knew; of tasks that are no more, nothing."""
        for name, seen in state.items():
            if name in self._seen:
                passed, ran = seen
                self._seen[name] = float(passed), float(ran)


def teaches_nothing(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group are all the same, so that no attempt is better than the others."""
    return not rewards or max(rewards) - min(rewards) < SAME_REWARD
