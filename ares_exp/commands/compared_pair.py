"""Two of the runs, and what their comparison says in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ares_exp.commands.compared_runs import ChosenRun
from ares_exp.records.statistics.comparison import Comparison
from ares_exp.records.statistics.power import Obstacle, Remedy
from ares_exp.records.terminal_text import count_of, format_number
from ares_exp.tasks.task_files import changed_files, content_of


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Run B against run A.

    Attributes:
        a, b: The runs.
        comparison: Their comparison.
        adjusted_p: Its p-value, adjusted for the number of compared pairs; `None`: they have no task in common.
    """

    a: ChosenRun
    b: ChosenRun
    comparison: Comparison
    adjusted_p: float | None

    @property
    def changed_tasks(self) -> tuple[str, ...]:
        """The compared tasks that differed between the two runs, as far as the records tell."""
        a, b = self.a.digests, self.b.digests
        names = [task.a.task_name for task in self.comparison.pairs]
        return tuple(name for name in names if name in a and name in b and _differ(a[name], b[name]))

    @property
    def is_settled(self) -> bool:
        """Whether the difference counts as one."""
        return self.adjusted_p is not None and self.adjusted_p < self.comparison.alpha

    @property
    def verdict(self) -> str:
        """One sentence."""
        difference = self.comparison.errors_as_zero
        if difference is None or self.adjusted_p is None:
            return f"{self.a.letter} and {self.b.letter} have no task in common: nothing can be said."
        if not self.is_settled and self.comparison.is_too_few:
            pairs = count_of(len(self.comparison.pairs), "pair")
            return (
                f"Cannot be settled with so few pairs (p = {format_p(self.adjusted_p)}): no p-value of {pairs} of "
                f"tasks is below {self.comparison.alpha:g}, whatever the rewards."
            )
        if not self.is_settled:
            return f"Not settled: chance alone makes a difference as large with p = {format_p(self.adjusted_p)}."
        better, worse = (self.b, self.a) if difference.value > 0 else (self.a, self.b)
        return f"{better.letter} is better than {worse.letter} (p = {format_p(self.adjusted_p)})."

    @property
    def advice(self) -> str | None:
        """Advice on how to settle the comparison; `None` when it is settled, or nothing was compared."""
        remedy = self.comparison.remedy
        return None if self.is_settled or remedy is None else _advice(remedy, self)


def _differ(a: str, b: str) -> bool:
    return content_of(a) != content_of(b) or bool(changed_files(a, b))


def _advice(remedy: Remedy, pair: ComparedPair) -> str:
    number = len(pair.comparison.pairs)
    of_tasks = "the one task" if number == 1 else f"these {number} tasks"
    more_tasks = (
        "" if remedy.tasks is None else f"about {remedy.tasks:,} tasks like these, with as many attempts as now"
    )
    if remedy.obstacle is Obstacle.NO_DIFFERENCE:
        if remedy.detectable is None or pair.comparison.is_too_few:
            return "No difference was observed."
        least = f"a difference of {format_number(remedy.detectable)} or more"
        return f"No difference was observed. On {of_tasks}, {least} would show ({_odds(remedy)})."
    guess = f"If the true difference is the observed one ({_odds(remedy)})"
    if remedy.attempts is not None:
        also = f", or {more_tasks}" if more_tasks else ""
        return f"{guess}, {remedy.attempts:,} attempts at each of {of_tasks} in either run would settle it{also}."
    ends = f"{more_tasks} would." if more_tasks else "it takes more tasks."
    match remedy.obstacle:
        case Obstacle.TOO_FEW_TASKS:
            cause = f"More attempts at {of_tasks} cannot settle it"
        case Obstacle.SINGLE_ATTEMPTS:
            return (
                f"{guess}, {more_tasks or 'more tasks'} would settle it. Whether more attempts at {of_tasks} would, "
                "two or more at each would tell."
            )
        case _:
            cause = f"More attempts at {of_tasks} cannot settle it: the difference varies too much from task to task"
    return f"{cause}. {guess}, {ends}"


def _odds(remedy: Remedy) -> str:
    return f"power {remedy.power:.0%}"


def format_p(p: float) -> str:
    """Formats three decimals, as far as they are meaningful."""
    return "less than 0.001" if p < 0.001 else f"{p:.3f}"


def compare_pairs(pairs: Sequence[tuple[ChosenRun, ChosenRun]], *, alpha: float) -> list[ComparedPair]:
    """Compares each pair; the p-values are adjusted for their number (Holm 1979)."""
    comparisons = [Comparison.of(a.statistics, b.statistics, alpha=alpha, comparisons=len(pairs)) for a, b in pairs]
    found = {number: one.errors_as_zero.p for number, one in enumerate(comparisons) if one.errors_as_zero is not None}
    adjusted = adjust(found)
    return [
        ComparedPair(a, b, comparison, adjusted.get(number))
        for number, ((a, b), comparison) in enumerate(zip(pairs, comparisons, strict=True))
    ]


def adjust(p_values: dict[int, float]) -> dict[int, float]:
    """Computes Holm's adjusted p-values: the chance that any of so many comparisons has as small a p-value."""
    adjusted, largest = {}, 0.0
    for rank, (number, p) in enumerate(sorted(p_values.items(), key=lambda one: one[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        adjusted[number] = largest
    return adjusted


def pair_document(pair: ComparedPair) -> dict[str, object]:
    """Returns the JSON form of a comparison."""
    return {
        "a": pair.a.letter,
        "b": pair.b.letter,
        "changed_tasks": pair.changed_tasks,
        **pair.comparison.to_dict(),
        "adjusted_p": pair.adjusted_p,
        "verdict": pair.verdict,
        "advice": pair.advice,
    }
