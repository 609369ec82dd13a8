"""The command `compare`: compares the statistics of runs, the jobs of a sweep, or two episodes."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from difflib import unified_diff
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.commands.cli.run_command import EXIT_OK
from ares_exp.commands.compared_runs import choose_runs, compare_pairs, differing_config, pair_document
from ares_exp.commands.comparison_text import print_report
from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.run_dir import dump_json, is_run
from ares_exp.records.statistics.comparison import ALPHA
from ares_exp.records.statistics.run_statistics import THRESHOLD, json_ready
from ares_exp.records.terminal_text import collapsed, count_of, make_console, one_line, printable
from ares_exp.runs.sweeps.sweep_report import REPEATED_BY, SweepReport, render_report, render_settings
from ares_exp.trajectories.divergence import Divergence, find_divergence
from ares_exp.trajectories.episode_printer import EpisodePrinter, EpisodeTotals, number, seconds
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.request_diff import Difference
from ares_exp.trajectories.stored_episodes import StoredEpisode, chosen_episode

if TYPE_CHECKING:
    from rich.console import Console

EXIT_DIFFERENT = 1
MOST_PAIRS = 1_000
CONTEXT_LINES = 3
HEAD, TAIL = 30, 10
STYLES = {"+": "green", "-": "red", "@": "cyan"}
DESCRIPTION = """\
Compares two or more runs on the tasks that they have in common. It shows the difference of the mean rewards with an
interval and a p-value, the tasks that pass in only one of the runs, and the number of attempts or tasks that would make
the difference significant. The first run is the baseline. The result of an attempt is its last episode. Attempts
without a reward count as zero, and a second row excludes them.

One sweep: prints a table of its jobs, even if it is still running or was killed. If several jobs differ only in
their seed, a second table has one row per setting, with the mean and an interval over tasks and seeds. `--over KEY`
prints this table for another key.

Two episodes: shows the first request, response or result that differs, how each episode continues, and the totals of
both. Differences of ids, times, durations, tokens, prices, reasoning and the name of the model are ignored.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first outputs/second
  %(prog)s outputs/first outputs/second --json | jq .pairs
  %(prog)s outputs/sweep
  %(prog)s outputs/sweep --over seed        one row per setting, with the mean over its seeds
  %(prog)s outputs/sweep/[0-9]*             every job of a sweep against its first
  %(prog)s outputs/sweep --all-pairs
  %(prog)s outputs/first/fix-bug outputs/second/fix-bug

Exit codes: 0 compared, or the episodes are equal; 1 the episodes differ; 2 the command line is wrong, or a run or an
episode cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "paths",
        type=run_path,
        nargs="+",
        metavar="RUN",
        help=f"a run directory, a sweep folder, or an episode: RUN/TASK, RUN/ID or a file; {MEANING}",
    )
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--threshold", type=_number, default=THRESHOLD, help="minimum reward of an attempt that passes (1.0)"
    )
    runs.add_argument(
        "--alpha",
        type=_probability,
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
        type=_count,
        default=2,
        metavar="N",
        help="number of steps of each episode to show after the difference (2)",
    )
    episodes.add_argument("--full", action="store_true", help="show long texts completely")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    paths: list[Path] = arguments.paths
    episodes = [path for path in paths if _is_episode(path)]
    if not episodes and len(paths) == 1 and not is_run(paths[0]) and not arguments.all_pairs:
        return _print_sweep(paths[0], arguments)
    if arguments.over is not None:
        raise ConfigError("`--over` requires one sweep. Name the folder of a sweep, without `--all-pairs`.")
    if not episodes:
        return _compare_runs(paths, arguments)
    if len(episodes) != 2 or len(paths) != 2:
        raise ConfigError(
            f"Expected two or more runs, one sweep, or two episodes, got {len(paths)} paths with {len(episodes)} "
            f"{'episode' if len(episodes) == 1 else 'episodes'}, such as {str(episodes[0])!r:.200}. Name episodes as "
            "RUN/TASK RUN2/TASK, and runs by their directories."
        )
    if arguments.json:
        raise ConfigError(
            "`--json` is not supported for two episodes. Use `ares-exp export` to read their steps as JSON."
        )
    return _compare_episodes(episodes[0], episodes[1], arguments)


def _is_episode(path: Path) -> bool:
    """Returns whether a path names an episode: it is a file, or does not exist and is below a run or a file."""
    return path.is_file() or (not path.exists() and any(one.is_file() or is_run(one) for one in path.parents))


def _print_sweep(path: Path, arguments: argparse.Namespace) -> int:
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
    return EXIT_OK


def _compare_runs(paths: Sequence[Path], arguments: argparse.Namespace) -> int:
    runs = choose_runs(paths, threshold=arguments.threshold, level=1 - arguments.alpha)
    chosen = list(combinations(runs, 2)) if arguments.all_pairs else [(runs[0], run) for run in runs[1:]]
    if len(chosen) > MOST_PAIRS:
        raise ConfigError(
            f"{len(runs)} runs are {len(chosen):,} pairs, but at most {MOST_PAIRS:,} are supported. Name fewer runs."
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
        print_report(runs, pairs)
    return EXIT_OK


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
    return EXIT_OK if divergence is None else EXIT_DIFFERENT


def _print_divergence(console: Console, divergence: Divergence, *, full: bool) -> None:
    _say(
        console,
        f"{count_of(divergence.step, 'time step')} in common; then: {one_line(divergence.difference.where)}",
        "bold",
    )
    lines = collapsed("\n".join(_diff_lines(divergence.difference)), full=full, head=HEAD, tail=TAIL)
    for line in lines:
        _say(console, f"  {line}", STYLES.get(line[:1], ""))


def _diff_lines(difference: Difference) -> list[str]:
    """Returns a unified diff of both strings, without the header lines with file names."""
    old, new = ((text or "").split("\n") if text is not None else [] for text in difference[1:])
    return [line.rstrip("\n") for line in unified_diff(old, new, n=CONTEXT_LINES, lineterm="")][2:]


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


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value


def _probability(text: str) -> float:
    value = _number(text)
    if not 1e-6 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f"expected a probability from 0.000001 to 0.5, got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of steps, 0 or more, got {text!r}")
    return int(text)
