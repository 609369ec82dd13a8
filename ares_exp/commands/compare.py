"""The command `compare`: compares two episodes, the jobs of a sweep, or the statistics of runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from difflib import unified_diff
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.commands.cli.run_command import number_type
from ares_exp.commands.compared_runs import (
    ChosenRun,
    ComparedPair,
    choose_runs,
    compare_pairs,
    differing_config,
    format_p,
    pair_document,
)
from ares_exp.errors import ConfigError
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.run_dir import dump_json, is_run
from ares_exp.records.statistics.comparison import ALPHA, Difference
from ares_exp.records.statistics.estimate import Estimate
from ares_exp.records.statistics.run_statistics import THRESHOLD, Spread, TaskStatistics, json_ready
from ares_exp.records.terminal_text import (
    collapsed,
    count_of,
    first_of,
    format_number,
    make_console,
    one_line,
    print_table,
    printable,
)
from ares_exp.reports.summary import format_estimate
from ares_exp.runs.sweeps.sweep_report import REPEATED_BY, SweepReport, render_report, render_settings
from ares_exp.trajectories.divergence import Divergence, find_divergence
from ares_exp.trajectories.episode_printer import EpisodePrinter, EpisodeTotals, number, seconds
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episodes import StoredEpisode, chosen_episode

if TYPE_CHECKING:
    from rich.console import Console

MOST_PAIRS = 1_000
CONTEXT_LINES = 3
HEAD, TAIL = 30, 10
MOST_KEYS, MOST_TASKS, MOST_NAMES = 20, 50, 5
KEY_CHARS, VALUE_CHARS = 60, 40
ALIGNED_LEFT = ("run", "key", "task")
STYLES = {"+": "green", "-": "red", "@": "cyan"}
HELP = """\
Compares two or more runs on the tasks that they have in common. It shows the difference of the mean rewards with an
interval and a p-value, the tasks that pass in only one of the runs, and the number of attempts or tasks that would make
the difference significant. The first run is the baseline. The result of an attempt is its last episode. Attempts
without a reward count as zero, and a second row excludes them.

One sweep: prints a table of its jobs, even if it is still running or was killed. If several jobs differ only in
their seed, a second table has one row per setting, with the mean and an interval over tasks and seeds. `--over KEY`
prints this table for another key.

Two episodes: shows the first request, response or result that differs, how each episode continues, and the totals of
both. Differences of ids, times, durations, tokens, prices, reasoning and the name of the model are ignored.
[arguments]
Examples:
  %(prog)s outputs/first outputs/second
  %(prog)s outputs/first outputs/second --json | jq .pairs
  %(prog)s outputs/sweep
  %(prog)s outputs/sweep --over seed        one row per setting, with the mean over its seeds
  %(prog)s outputs/sweep/[0-9]*             every job of a sweep against the first job
  %(prog)s outputs/sweep --all-pairs
  %(prog)s outputs/first/fix-bug outputs/second/fix-bug

Exit codes: 0 compared, or the episodes are equal; 1 the episodes differ; 2 the command line is wrong, or a run or an
episode cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        type=run_path,
        nargs="+",
        metavar="RUN",
        help=f"a run directory, a sweep folder, or an episode: RUN/TASK, RUN/ID or a file; {MEANING}",
    )
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--threshold",
        type=number_type(float, -sys.float_info.max, sys.float_info.max, "a number"),
        default=THRESHOLD,
        help="minimum reward of an attempt that passes (1.0)",
    )
    runs.add_argument(
        "--alpha",
        type=number_type(float, 1e-6, 0.5, "a probability from 0.000001 to 0.5"),
        default=ALPHA,
        help="significance level: p-values below it are significant, and intervals have level 1 - alpha (0.05)",
    )
    runs.add_argument(
        "--all-pairs", action="store_true", help="compare every pair of runs, not only each run with the first"
    )
    runs.add_argument(
        "--over",
        metavar="KEY",
        help="for a sweep: one row per setting, with the mean over the jobs that differ only in KEY",
    )
    runs.add_argument(
        "--json", action="store_true", help="print the result as JSON; for a sweep, the content of sweep.json"
    )
    episodes = parser.add_argument_group("episodes")
    episodes.add_argument(
        "--after",
        type=number_type(int, 0, sys.maxsize, "a number of steps, 0 or more"),
        default=2,
        metavar="N",
        help="number of steps of each episode to show after the difference (2)",
    )
    episodes.add_argument("--full", action="store_true", help="show long texts completely")


def run(arguments: argparse.Namespace) -> int | None:
    paths: list[Path] = arguments.paths
    episodes = [
        path
        for path in paths
        if path.is_file() or (not path.exists() and any(one.is_file() or is_run(one) for one in path.parents))
    ]
    if not episodes and len(paths) == 1 and not is_run(paths[0]) and not arguments.all_pairs:
        _print_sweep(paths[0], arguments)
        return None
    if arguments.over is not None:
        raise ConfigError("`--over` requires one sweep. Name the folder of a sweep, without `--all-pairs`.")
    if not episodes:
        _compare_runs(paths, arguments)
        return None
    if len(episodes) != 2 or len(paths) != 2:
        raise ConfigError(
            f"Expected two or more runs, one sweep, or two episodes, got {len(paths)} paths with "
            f"{count_of(len(episodes), 'episode')}, such as {str(episodes[0])!r:.200}. Name episodes as "
            "RUN/TASK RUN2/TASK, and runs by their directories."
        )
    if arguments.json:
        raise ConfigError(
            "`--json` is not supported for two episodes. Use `ares-exp export` to read their steps as JSON."
        )
    return _compare_episodes(episodes[0], episodes[1], arguments)


def _print_sweep(path: Path, arguments: argparse.Namespace) -> None:
    report = SweepReport.read(path, over=arguments.over)
    if arguments.over is not None and not report.settings:
        raise ConfigError(
            f"No jobs of {path} differ only in `{arguments.over}`, so there are no jobs to average. Run "
            f"the sweep with several values of a key, such as `{REPEATED_BY}=1,2,3,4`."
        )
    if arguments.json:
        sys.stdout.write(dump_json(report.to_dict(), indent=2) + "\n")
    else:
        (render_report if arguments.over is None else render_settings)(report, sys.stdout)


def _compare_runs(paths: Sequence[Path], arguments: argparse.Namespace) -> None:
    runs = choose_runs(paths, threshold=arguments.threshold, level=1 - arguments.alpha)
    chosen = list(combinations(runs, 2)) if arguments.all_pairs else [(runs[0], run) for run in runs[1:]]
    if len(chosen) > MOST_PAIRS:
        raise ConfigError(
            f"{len(runs)} runs make {len(chosen):,} pairs, but at most {MOST_PAIRS:,} can be compared. Name fewer runs."
        )
    pairs = compare_pairs(chosen, alpha=arguments.alpha)
    if arguments.json:
        document = {
            "schema_version": 1,
            "threshold": arguments.threshold,
            "alpha": arguments.alpha,
            "runs": [
                {
                    "run": run.letter,
                    "name": run.name,
                    "path": str(run.path),
                    "notes": run.notes,
                    "statistics": run.statistics.to_dict(),
                }
                for run in runs
            ],
            "differing_config": differing_config(runs),
            "pairs": list(map(pair_document, pairs)),
        }
        sys.stdout.write(json.dumps(json_ready(document), indent=2, ensure_ascii=True, allow_nan=False) + "\n")
    else:
        _print_report(runs, pairs)


def _print_report(runs: Sequence[ChosenRun], pairs: Sequence[ComparedPair]) -> None:
    """Prints the runs, the comparison of each pair, and the tasks whose pass rate differs between the compared runs."""
    console = make_console()
    _print_runs(console, runs)
    _print_config(console, runs)
    if len(pairs) > 1:
        adjusted = f"p-values of verdicts are adjusted for {len(pairs)} comparisons (Holm)"
        _say(console, f"{adjusted}; intervals are not adjusted.\n")
    for pair in pairs:
        tasks = count_of(len(pair.comparison.pairs), "task")
        _say(console, f"{pair.b.letter} against {pair.a.letter}, on {tasks} in both runs", "bold")
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
    rates = [{rate.k: rate for rate in run.statistics.errors_as_zero.pass_rates} for run in runs]
    for k in sorted(set.intersection(*map(set, rates)) - {1})[-1:]:  # the largest k above 1 that all runs have
        columns[f"pass@{k}"] = [_estimate(rate[k].pass_at_k) for rate in rates]
        columns[f"pass^{k}"] = [_estimate(rate[k].pass_hat_k) for rate in rates]
    for name, cells in {"tokens": "tokens", "$": "cost", "seconds": "seconds"}.items():
        spreads = [getattr(run.statistics, cells) for run in runs]
        if any(spread.total for spread in spreads):
            columns[name] = [_mean(spread) for spread in spreads]
    passes = sorted((name for name in columns if name.startswith("pass")), reverse=True)  # pass^k before pass@k
    leave_out = ["seconds", "$", "tokens", "scored", *passes, "attempts", "tasks"]  # dropped in this order
    print_table(console, columns, texts=ALIGNED_LEFT, leave_out=leave_out)
    if "scored only" in columns:
        _say(console, "mean reward, pass@k and pass^k: an attempt without a reward counts as failed, with reward 0")
    for run in runs:
        if run.name != str(run.path):
            _say(console, f"{run.letter}  {one_line(str(run.path), 300)}")
        for note in run.notes:
            _say(console, f"{run.letter}: {note}", "yellow")
    _say(console, "")


def _print_config(console: Console, runs: Sequence[ChosenRun]) -> None:
    differing = differing_config(runs)
    if not differing or len(runs) > 2:  # the names of a sweep's runs contain the differences
        return
    shown = list(differing.items())[:MOST_KEYS]
    columns = {"key": [one_line(key, KEY_CHARS) for key, _ in shown]}
    for place, run in enumerate(runs):
        cells = [values[place] for _, values in shown]
        columns[run.letter] = ["-" if cell is None else one_line(str(cell), VALUE_CHARS) for cell in cells]
    print_table(console, columns, texts=(*columns,))
    if len(differing) > len(shown):
        _say(console, f"and {len(differing) - len(shown)} more keys (see --json)")
    _say(console, "")


def _pair_lines(pair: ComparedPair) -> Iterator[str]:
    comparison = pair.comparison
    for letter, names in ((pair.a.letter, comparison.only_a), (pair.b.letter, comparison.only_b)):
        if names:
            yield f"only in {letter}, so left out: {first_of([*map(one_line, names)], MOST_NAMES)}"
    if pair.changed_tasks:
        changed = first_of([*map(one_line, pair.changed_tasks)], MOST_NAMES)
        yield f"compared, although the task changed between the runs: {changed}"
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


def _print_flips(console: Console, runs: Sequence[ChosenRun], pairs: Sequence[ComparedPair]) -> None:
    """Prints a table of the tasks whose pass rates differ in any pair, largest difference first.

    The table has a column per run, with the number of passed attempts, such as `3/4`.
    """
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
    print_table(console, columns, texts=ALIGNED_LEFT)
    more = f"; {len(names) - MOST_TASKS} more tasks differ, see --json" if len(names) > MOST_TASKS else ""
    _say(console, f"attempts that passed (reward {format_number(runs[0].statistics.threshold)} or more){more}")


def _passed(task: TaskStatistics | None) -> str:
    if task is None:
        return "-"
    errors = task.attempts - task.scored
    return f"{task.passed}/{task.attempts}" + (f" ({count_of(errors, 'error')})" if errors else "")


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


def _compare_episodes(a: Path, b: Path, arguments: argparse.Namespace) -> int:
    stored = chosen_episode(a), chosen_episode(b)
    old, new = (one.load() for one in stored)
    console = make_console()
    for name, one in zip("AB", stored, strict=True):
        _say(console, f"{name}  {one_line(one.episode_id)}  {one_line(one.task_name)}  {one.path}", "bold")
    divergence = find_divergence(old, new)
    if divergence is None:
        _say(console, f"equal: all {count_of(len(old.steps), 'time step')}", "green")
    else:
        _print_divergence(console, divergence, full=arguments.full)
        for name, episode in zip("AB", (old, new), strict=True):
            _print_continuation(console, name, episode, divergence, arguments)
    _print_totals(console, stored, (old, new))
    return exit_codes.COMPLETE if divergence is None else exit_codes.INCOMPLETE


def _print_divergence(console: Console, divergence: Divergence, *, full: bool) -> None:
    _say(
        console,
        f"{count_of(divergence.step, 'time step')} in common; then: {one_line(divergence.difference.where)}",
        "bold",
    )
    old, new = ([] if text is None else text.split("\n") for text in divergence.difference[1:])
    diff = [line.rstrip("\n") for line in unified_diff(old, new, n=CONTEXT_LINES, lineterm="")][2:]
    for line in collapsed("\n".join(diff), full=full, head=HEAD, tail=TAIL):
        _say(console, f"  {line}", STYLES.get(line[:1], ""))


def _print_continuation(
    console: Console, name: str, episode: EpisodeTrajectory, divergence: Divergence, arguments: argparse.Namespace
) -> None:
    left = range(divergence.step, len(episode.steps))
    if not left or not arguments.after:
        return
    _say(console, "")
    _say(console, f"{name} continues for {count_of(len(left), 'time step')}", "bold reverse")
    printer = EpisodePrinter(console, episode, full=arguments.full)
    for position in left[: arguments.after]:
        printer.step(position)


def _print_totals(
    console: Console, stored: tuple[StoredEpisode, StoredEpisode], episodes: tuple[EpisodeTrajectory, EpisodeTrajectory]
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("", "A", "B", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in zip(*(_totals(*one) for one in zip(stored, episodes, strict=True)), strict=True):
        name, was, has = row[0][0], row[0][1], row[1][1]
        table.add_row(name, Text(was), Text(has, style="" if was == has else "bold"))
    console.print(table)


def _totals(stored: StoredEpisode, episode: EpisodeTrajectory) -> list[tuple[str, str]]:
    totals = EpisodeTotals.of(episode)
    times = [("seconds", totals.duration_sec)]
    times += [(f"{name} seconds", getattr(totals, f"{name}_sec")) for name in ("policy", "environment", "container")]
    return [
        ("outcome", stored.outcome or "running"),
        ("error", "–" if episode.error is None else one_line(episode.error.type)),
        ("reward", number(episode.total_reward)),
        ("steps", str(episode.step_count)),
        ("commands", str(totals.commands)),
        ("prompt tokens", number(totals.prompt_tokens)),
        ("generated tokens", number(totals.generated_tokens)),
        ("cost, US dollars", number(totals.cost)),
        *((name, "–" if value is None else seconds(value).removesuffix(" s")) for name, value in times),
    ]


def _say(console: Console, line: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(printable(line), style=style), soft_wrap=True)
