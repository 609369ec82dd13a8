"""The order in which trajectories are put into a report until it is full: what helps most goes first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ares_exp.records.results import UNFINISHED, EpisodeResult
from ares_exp.records.run_summary import RunSummary

WHICH = ("failed", "all", "none")


def in_order(summary: RunSummary, recorded: Collection[str], *, first_tasks: Collection[str] = ()) -> list[str]:
    """Returns the ids of a run's recorded episodes: errors and those in progress, failures, a pass of each flaky task,
    then the others, the longest first; superseded tries last. Of equal ones, the first attempts at each task go first.

    Args:
        summary: The run.
        recorded: Ids of the episodes that have a trajectory.
        first_tasks: Tasks that go before all others.
    """  # noqa: D205 -- one list
    final = summary.final
    flaky = _flaky(final, summary.threshold)
    ranks: dict[str, tuple[int, int, int, str]] = {}
    shown_pass: set[str] = set()
    for result in sorted(final, key=lambda one: (one.attempt, one.task_name)):
        rank = _rank(result, summary.threshold)
        if rank == 3 and result.task_name in flaky - shown_pass:
            shown_pass.add(result.task_name)
            rank = 2
        later = -result.num_steps if rank == 3 else result.attempt
        ranks[result.episode_id] = (-1 if result.task_name in first_tasks else rank, rank, later, result.task_name)
    tries = {result.episode_id for result in summary.results}
    for episode_id in recorded:
        ranks.setdefault(episode_id, (5, 0, 0, "") if episode_id in tries else (0, 0, 0, ""))
    return sorted((one for one in ranks if one in recorded), key=lambda one: (ranks[one], one))


def failed(summary: RunSummary, recorded: Collection[str]) -> set[str]:
    """Returns the ids of recorded episodes that have not passed."""
    passed = {one.episode_id for one in summary.final if _rank(one, summary.threshold) == 3}
    return set(recorded) - passed


def _rank(result: EpisodeResult, threshold: float) -> int:
    if result.reward is None:
        return 4 if result.outcome in UNFINISHED else 0
    return 1 if result.reward < threshold else 3


def _flaky(final: Sequence[EpisodeResult], threshold: float) -> set[str]:
    passed: dict[str, set[bool]] = {}
    for result in final:
        if result.reward is not None:
            passed.setdefault(result.task_name, set()).add(result.reward >= threshold)
    return {task for task, found in passed.items() if len(found) == 2}
