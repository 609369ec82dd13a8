"""The comparison of two runs on their common tasks: difference, p-value, and number of attempts needed."""

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
    """The statistics of one task in run A (`a`) and in run B (`b`)."""

    a: TaskStatistics
    b: TaskStatistics

    @property
    def difference(self) -> float:
        """The share of attempts that passed in B minus the share in A. Attempts without a reward count as failed."""
        return self.b.passed / self.b.attempts - self.a.passed / self.a.attempts


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of run B with run A, which is the baseline.

    Attributes:
        alpha: P-value below which a difference is significant.
        pairs: Statistics of the tasks that are in both runs.
        only_a, only_b: Names of tasks that are only in one of the runs. These tasks are not compared.
        errors_as_zero: Difference of the mean rewards if attempts without a reward count as 0; `None` without common
            tasks.
        scored_only: Difference of the mean rewards over only the attempts that have a reward; `None` without common
            tasks.
        remedy: Number of attempts or tasks that would make `errors_as_zero` significant; `None` without common tasks.
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
        """Compares the statistics of run A (the baseline) and run B, which must use the same threshold.

        If this is one of several comparisons, pass their number as `comparisons`. `remedy` is then computed with
        `alpha` divided by this number. The p-values are not adjusted.
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
        """Whether there are so few common tasks that even the largest difference could not be significant."""
        return bool(self.pairs) and is_too_few(len(self.pairs), self.alpha)

    @property
    def flips(self) -> tuple[TaskPair, ...]:
        """The tasks whose share of passed attempts differs between the runs, starting with the largest difference."""
        changed = [pair for pair in self.pairs if pair.difference]
        return tuple(sorted(changed, key=lambda pair: (-abs(pair.difference), pair.a.task_name)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form, which has `flips` instead of `pairs`. NaN and infinity become `None`."""
        data = {key: value for key, value in asdict(self).items() if key != "pairs"}
        flips = [{"task_name": one.a.task_name, **_counts("a", one.a), **_counts("b", one.b)} for one in self.flips]
        return dict(json_ready({**data, "flips": flips}))


def _counts(name: str, task: TaskStatistics) -> dict[str, Any]:
    return {f"{name}_passed": task.passed, f"{name}_scored": task.scored, f"{name}_attempts": task.attempts}


def _difference(
    pairs: tuple[TaskPair, ...], rewards_of: Callable[[TaskStatistics], tuple[float, ...]], alpha: float
) -> Difference | None:
    rewards = [(rewards_of(pair.a), rewards_of(pair.b)) for pair in pairs]
    both = [(a, b) for a, b in rewards if a and b]
    is_bounded = all(0.0 <= reward <= 1.0 for pair in both for own in pair for reward in own)
    return Difference.of([sum(b) / len(b) - sum(a) / len(a) for a, b in both], is_bounded=is_bounded, level=1 - alpha)
