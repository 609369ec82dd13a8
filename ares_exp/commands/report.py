"""The command `report`: writes an HTML file about a run, a sweep, or two runs."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ares_exp.commands.cli.run_command import number_type
from ares_exp.commands.compared_runs import (
    MOST_RUNS,
    ComparedPair,
    choose_runs,
    compare_pairs,
    differing_config,
    pair_document,
)
from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.run_dir import is_run, is_sweep
from ares_exp.records.statistics.comparison import ALPHA
from ares_exp.records.statistics.estimate import mean
from ares_exp.records.statistics.run_statistics import THRESHOLD, json_ready
from ares_exp.records.terminal_text import count_of, format_size, printable
from ares_exp.reports.run_payload import ShownRun
from ares_exp.reports.written_report import KINDS, WHICH, Subject, write_report
from ares_exp.runs.sweeps.sweep_report import SweepReport

NAME = "report.html"
SUFFIXES = (".html", ".htm")
HELP = """\
Writes one HTML file that shows a run, a sweep, or two runs side by side: tables, pictures, trajectories with commands
and the output of the verifier. The file opens in any browser without a network. You can write it while the run
continues or after it was killed. Failed episodes come first. The report lists the trajectories that do not fit into it.
[arguments]
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/first outputs/second -o second.html --open
  %(prog)s outputs/sweep --episodes none
  %(prog)s latest --redact paths,env -o to-share.html

Exit codes: 0 written; 2 the command line is wrong, a run cannot be read, or the file cannot be written.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=run_path, metavar="RUN", help=f"a run directory or a sweep folder; {MEANING}")
    parser.add_argument("other", type=run_path, nargs="?", metavar="RUN2", help="a run to compare with the first")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help=f"path of the file (default: {NAME} in RUN; for two runs, in the current folder)",
    )
    parser.add_argument(
        "--max-mb",
        type=number_type(float, 1, 2000, "a number from 1 to 2000"),
        default=25.0,
        metavar="N",
        help="maximum size of the file in 10^6 bytes (25)",
    )
    parser.add_argument(
        "--episodes",
        choices=WHICH,
        default="all",
        help="episodes to include with their steps, as far as they fit: failed, all or none (all)",
    )
    parser.add_argument(
        "--redact",
        type=_kinds,
        default=(),
        metavar="WHAT",
        help="hide details of this machine before you share the report: paths, env, or paths,env",
    )
    parser.add_argument("--open", action="store_true", help="open the file in the browser")


def run(arguments: argparse.Namespace) -> None:
    if arguments.other is not None:
        subject = _two_runs(arguments.run, arguments.other)
    else:
        subject = _sweep(arguments.run) if is_sweep(arguments.run) else Subject.of_run(arguments.run)
    out = arguments.out or (Path(NAME) if arguments.other is not None else arguments.run / NAME)
    if out.suffix not in SUFFIXES:
        raise ConfigError(
            f"Expected the name of a file that ends with {' or '.join(SUFFIXES)}, got {out}. Use `-o {NAME}`."
        )
    written = write_report(
        subject, out, max_bytes=int(arguments.max_mb * 10**6), which=arguments.episodes, redact=arguments.redact
    )
    left = f", {written.left_out:,} left out (the file lists them)" if written.left_out else ""
    shown = f"{count_of(written.episodes, 'episode')}, {count_of(written.trajectories, 'trajectory', 'trajectories')}"
    sys.stdout.write(printable(f"Written to {out}: {format_size(written.size)}, {shown}{left}.\n"))
    if arguments.open:
        webbrowser.open(out.resolve().as_uri())


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(text.split(",")))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"expected {', '.join(KINDS)} or both (`paths,env`), got {unknown[0]!r}")
    return kinds


def _two_runs(path: Path, other: Path) -> Subject:
    runs = choose_runs([path, other], threshold=THRESHOLD, level=1 - ALPHA)
    if len(runs) != 2:
        raise ConfigError(f"Expected two runs to show side by side, got {len(runs)}. Name two run directories.")
    shown = [ShownRun(run.path) for run in runs]
    if (threshold := shown[0].summary.threshold) != THRESHOLD:
        runs = choose_runs([path, other], threshold=threshold, level=1 - ALPHA)
    (pair,) = compare_pairs([(runs[0], runs[1])], alpha=ALPHA)
    differing = [{"key": key, "values": values} for key, values in differing_config(runs).items()]
    flipped = [task.a.task_name for task in pair.comparison.flips]
    names = [f"{run.letter}: {run.path}" for run in runs]
    return Subject(
        path,
        dict(zip(names, shown, strict=True)),
        {"pair": json_ready({**pair_document(pair), "tasks": _tasks(pair), "differing_config": differing})},
        flipped,
    )


def _tasks(pair: ComparedPair) -> list[dict[str, Any]]:
    return [
        {
            "task_name": task.a.task_name,
            "a": mean(task.a.rewards_with_zeros),
            "b": mean(task.b.rewards_with_zeros),
            "difference": mean(task.b.rewards_with_zeros) - mean(task.a.rewards_with_zeros),
            "flipped": bool(task.difference),
            **{f"{name}_passed": side.passed for name, side in (("a", task.a), ("b", task.b))},
            **{f"{name}_attempts": side.attempts for name, side in (("a", task.a), ("b", task.b))},
        }
        for task in pair.comparison.pairs
    ]


def _sweep(path: Path) -> Subject:
    report = SweepReport.read(path)
    started = [row.job for row in report.rows if is_run(path / row.job)][:MOST_RUNS]
    numbers = {job: number for number, job in enumerate(started)}
    keys = list(dict.fromkeys(key for row in report.rows for key in row.overrides))
    jobs = [{**asdict(row), "run": numbers.get(row.job)} for row in report.rows]
    sweep = {**report.to_dict(), "path": str(path), "keys": keys, "jobs": json_ready(jobs)}
    names = {row.job: " ".join(f"{key}={value}" for key, value in row.overrides.items()) for row in report.rows}
    return Subject(path, {f"{job}: {names[job]}": ShownRun(path / job) for job in started}, {"sweep": sweep})
