"""The text of a comparison for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ares_exp.commands.compared_runs import ChosenRun, ComparedPair, differing_config, format_p
from ares_exp.records.statistics.estimate import Estimate
from ares_exp.records.statistics.paired import Difference
from ares_exp.records.statistics.run_statistics import Spread
from ares_exp.records.statistics.task_statistics import TaskStatistics
from ares_exp.records.terminal_text import columns_that_fit, count_of, format_number, make_console, make_table, one_line
from ares_exp.reports.summary import format_estimate

if TYPE_CHECKING:
    from rich.console import Console

MOST_KEYS, MOST_TASKS, MOST_NAMES = 20, 50, 5
KEY_CHARS, VALUE_CHARS = 60, 40
ALIGNED_LEFT = ("run", "key", "task")


def print_report(runs: Sequence[ChosenRun], pairs: Sequence[ComparedPair]) -> None:
    """Prints the runs, each pair, and the tasks whose share of passed attempts differs between the runs of a pair."""
    console = make_console()
    _print_runs(console, runs)
    _print_config(console, runs)
    if len(pairs) > 1:
        adjusted = f"p-values of verdicts are adjusted for {len(pairs)} comparisons (Holm)"
        _say(console, f"{adjusted}; intervals are not adjusted.\n")
    for pair in pairs:
        tasks = count_of(len(pair.comparison.pairs), "task")
        _say(console, f"{pair.b.letter} against {pair.a.letter}, on {tasks} that both have", "bold")
        for line in _pair_lines(pair):
            _say(console, f"  {line}")
        _say(console, "")
    _print_flips(console, runs, pairs)


def _print_runs(console: Console, runs: Sequence[ChosenRun]) -> None:
    columns = {
        "": [run.letter for run in runs],
        "run": [one_line(run.name, KEY_CHARS) for run in runs],
        "tasks": [f"{len(run.statistics.tasks):,}" for run in runs],
        "attempts": [f"{run.statistics.attempts:,}" for run in runs],
        "mean reward": [_estimate(run.statistics.errors_as_zero.mean_reward) for run in runs],
    }
    if any(run.statistics.scored_only.attempts < run.statistics.attempts for run in runs):
        columns["scored"] = [f"{run.statistics.scored_only.attempts:,}" for run in runs]
        columns["scored only"] = [_estimate(run.statistics.scored_only.mean_reward) for run in runs]
    for k in _common_ks(runs):
        for name in ("pass_at_k", "pass_hat_k"):
            columns[f"{'pass@' if name == 'pass_at_k' else 'pass^'}{k}"] = [_rate(run, k, name) for run in runs]
    for name, cells in {"tokens": "tokens", "$": "cost", "seconds": "seconds"}.items():
        spreads = [getattr(run.statistics, cells) for run in runs]
        if any(spread.total for spread in spreads):
            columns[name] = [_mean(spread) for spread in spreads]
    rates = sorted((name for name in columns if name.startswith("pass")), reverse=True)  # pass^k before pass@k
    leave_out = ["seconds", "$", "tokens", "scored", *rates, "attempts", "tasks"]  # repeated columns first
    console.print(
        make_table(
            columns_that_fit(columns, console.width, leave_out=[n for n in leave_out if n in columns]),
            texts=ALIGNED_LEFT,
        )
    )
    if "scored only" in columns:
        _say(console, "mean reward, pass@k and pass^k: an attempt without a reward has reward 0, and has failed")
    for run in runs:
        if run.name != str(run.path):
            _say(console, f"{run.letter}  {one_line(str(run.path), 300)}")
        for note in run.notes:
            _say(console, f"{run.letter}: {note}", "yellow")
    _say(console, "")


def _common_ks(runs: Sequence[ChosenRun]) -> list[int]:
    """Returns a list with the largest k above 1 for which every run has pass@k; empty if there is no such k."""
    ks = [{rate.k for rate in run.statistics.errors_as_zero.pass_rates if rate.k > 1} for run in runs]
    return sorted(set.intersection(*ks))[-1:]


def _rate(run: ChosenRun, k: int, name: str) -> str:
    rate = next(rate for rate in run.statistics.errors_as_zero.pass_rates if rate.k == k)
    return _estimate(getattr(rate, name))


def _print_config(console: Console, runs: Sequence[ChosenRun]) -> None:
    differing = differing_config(runs)
    if not differing or len(runs) > 2:  # the names of a sweep's runs contain the differences
        return
    shown = list(differing.items())[:MOST_KEYS]
    columns = {"key": [one_line(key, KEY_CHARS) for key, _ in shown]}
    for number, run in enumerate(runs):
        columns[run.letter] = [
            "-" if values[number] is None else one_line(str(values[number]), VALUE_CHARS) for _, values in shown
        ]
    console.print(make_table(columns, texts=(*columns,)))
    if len(differing) > len(shown):
        _say(console, f"and {len(differing) - len(shown)} more keys, with --json")
    _say(console, "")


def _pair_lines(pair: ComparedPair) -> Iterator[str]:
    comparison = pair.comparison
    for letter, names in ((pair.a.letter, comparison.only_a), (pair.b.letter, comparison.only_b)):
        if names:
            yield f"left out, only {letter} has: {_named(names)}"
    if pair.changed_tasks:
        yield f"compared, although the task changed between the runs: {_named(pair.changed_tasks)}"
    every, scored = comparison.errors_as_zero, comparison.scored_only
    if every is not None:
        yield f"mean reward {_difference(every)}"
    if scored is not None and scored != every:
        fewer = f", on {scored.tasks:,} of them" if scored.tasks < len(comparison.pairs) else ""
        yield f"scored only {_difference(scored)}{fewer}"
    spent = [
        _change(what, getattr(pair.a.statistics, what), getattr(pair.b.statistics, what))
        for what in ("tokens", "cost", "seconds")
    ]
    if any(spent):
        yield f"per attempt: {', '.join(filter(None, spent))}"
    yield pair.verdict
    if pair.advice is not None:
        yield pair.advice


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(map(one_line, names[:MOST_NAMES]))}{more}"


def _print_flips(console: Console, runs: Sequence[ChosenRun], pairs: Sequence[ComparedPair]) -> None:
    """Prints the tasks that differ in any pair, largest difference first, with the passed attempts of each run."""
    largest: dict[str, float] = {}
    for pair in pairs:
        for flip in pair.comparison.flips:
            name = flip.a.task_name
            largest[name] = max(largest.get(name, 0.0), abs(flip.difference))
    if not largest:
        return
    names = sorted(largest, key=lambda name: (-largest[name], name))
    columns = {"task": [one_line(name, KEY_CHARS) for name in names[:MOST_TASKS]]}
    for run in runs:
        tasks = {task.task_name: task for task in run.statistics.tasks}
        columns[run.letter] = [_passed(tasks.get(name)) for name in names[:MOST_TASKS]]
    console.print(make_table(columns, texts=ALIGNED_LEFT))
    more = f"; {len(names) - MOST_TASKS} more tasks differ, see --json" if len(names) > MOST_TASKS else ""
    _say(console, f"attempts that passed (reward {format_number(runs[0].statistics.threshold)} or more){more}")


def _passed(task: TaskStatistics | None) -> str:
    if task is None:
        return "-"
    errors = task.attempts - task.scored
    return f"{task.passed}/{task.attempts}" + (f" ({errors} {'error' if errors == 1 else 'errors'})" if errors else "")


def _difference(difference: Difference) -> str:
    interval = ""
    if difference.low is not None and difference.high is not None:
        of_test = " (from the p-value)" if difference.interval == "test" else ""
        interval = f" [{_signed(difference.low)}, {_signed(difference.high)}]{of_test}"
    return f"{_signed(difference.value)}{interval}, p = {format_p(difference.p)} ({difference.test} test)"


def _change(what: str, a: Spread, b: Spread) -> str | None:
    if not a.total and not b.total:
        return None
    ratio = f" ({b.mean / a.mean - 1:+.0%})" if a.mean else ""
    unit = "$ " if what == "cost" else f"{what} "
    return f"{unit}{_mean(a)} -> {_mean(b)}{ratio}"


def _mean(spread: Spread) -> str:
    return f"{spread.mean:,.0f}" if abs(spread.mean) >= 100 else format_number(spread.mean)


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{format_number(abs(value))}"


def _estimate(estimate: Estimate | None) -> str:
    return "-" if estimate is None else format_estimate(estimate)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, soft_wrap=True)
