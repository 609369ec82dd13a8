"""The comparison of two runs on the same tasks: difference, p-value, and the attempts that would settle it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

from ares_exp.records.statistics.paired import Difference
from ares_exp.records.statistics.power import Remedy, find_remedy, is_too_few
from ares_exp.records.statistics.run_statistics import RunStatistics, json_ready
from ares_exp.records.statistics.task_statistics import TaskStatistics

ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class TaskPair:
    """One task that both runs run.

    Attributes:
        a, b: Its statistics in either run.
    """

    a: TaskStatistics
    b: TaskStatistics

    @property
    def difference(self) -> float:
        """B's share of attempts that passed minus A's, attempts without a reward having failed."""
        return self.b.passed / self.b.attempts - self.a.passed / self.a.attempts


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run B against run A.

    Attributes:
        alpha: The p-value below which a difference is significant.
        pairs: The tasks that both have, by name.
        only_a, only_b: Tasks that one has alone: they are left out.
        errors_as_zero: The difference of the mean rewards where an attempt without a reward has reward 0; `None` when
            there is no task that both have.
        scored_only: The same where it is left out.
        remedy: The number of attempts or tasks that would settle the first, if it is known.
    """

    alpha: float
    pairs: tuple[TaskPair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    errors_as_zero: Difference | None
    scored_only: Difference | None
    remedy: Remedy | None

    @classmethod
    def of(cls, a: RunStatistics, b: RunStatistics, *, alpha: float = ALPHA, comparisons: int = 1) -> Self:
        """Compares the statistics of two runs, made with the same threshold.

        Args:
            a: The baseline.
            b: The run that is compared with it.
            alpha: The p-value below which a difference is significant.
            comparisons: Number of comparisons that p-values are adjusted for: the remedy is for all of them.
        """
        of_a, of_b = ({task.task_name: task for task in run.tasks} for run in (a, b))
        pairs = tuple(TaskPair(task, of_b[name]) for name, task in of_a.items() if name in of_b)
        rewards = [(pair.a.rewards_with_zeros, pair.b.rewards_with_zeros) for pair in pairs]
        errors_as_zero = _difference(pairs, lambda task: task.rewards_with_zeros, alpha)
        p = errors_as_zero.p if errors_as_zero is not None else None
        return cls(
            alpha=alpha,
            pairs=pairs,
            only_a=tuple(name for name in of_a if name not in of_b),
            only_b=tuple(name for name in of_b if name not in of_a),
            errors_as_zero=errors_as_zero,
            scored_only=_difference(pairs, lambda task: task.scored_rewards, alpha),
            remedy=find_remedy(rewards, alpha=alpha / comparisons, p=p) if rewards else None,
        )

    @property
    def is_too_few(self) -> bool:
        """Whether no difference of so few tasks can be significant."""
        return bool(self.pairs) and is_too_few(len(self.pairs), self.alpha)

    @property
    def flips(self) -> tuple[TaskPair, ...]:
        """Tasks that do not pass equally often in both, the largest differences first."""
        changed = [pair for pair in self.pairs if pair.difference]
        return tuple(sorted(changed, key=lambda pair: (-abs(pair.difference), pair.a.task_name)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form; a number that is not finite is `None`."""
        data = {key: value for key, value in asdict(self).items() if key != "pairs"}
        flips = [{"task_name": one.a.task_name, **_counts("a", one.a), **_counts("b", one.b)} for one in self.flips]
        clean: dict[str, Any] = json_ready({**data, "flips": flips})
        return clean


def _counts(name: str, task: TaskStatistics) -> dict[str, Any]:
    return {f"{name}_passed": task.passed, f"{name}_scored": task.scored, f"{name}_attempts": task.attempts}


def _difference(
    pairs: tuple[TaskPair, ...], rewards_of: Callable[[TaskStatistics], tuple[float, ...]], alpha: float
) -> Difference | None:
    rewards = [(rewards_of(pair.a), rewards_of(pair.b)) for pair in pairs]
    both = [(a, b) for a, b in rewards if a and b]
    is_bounded = all(0.0 <= reward <= 1.0 for pair in both for own in pair for reward in own)
    return Difference.of([sum(b) / len(b) - sum(a) / len(a) for a, b in both], is_bounded=is_bounded, level=1 - alpha)
