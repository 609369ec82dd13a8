"""The command line of `ares-exp compare`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import combinations

from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.reporting.compare.chosen_runs import choose_runs, differing_config
from ares_exp.reporting.compare.pair import compare_pairs, pair_document
from ares_exp.reporting.compare.report import print_report
from ares_exp.statistics.comparison import ALPHA
from ares_exp.statistics.run_statistics import THRESHOLD, json_ready
from ares_exp.terminal.run_command import EXIT_OK

MOST_PAIRS = 1_000
DESCRIPTION = """\
Compares runs on the tasks that they have in common: how much the mean reward differs, with an interval and a p-value,
which tasks flipped, and how many attempts or tasks would settle it. The first run is the baseline. The last try of an
attempt is its result; one without a reward counts as zero (and is left out, beside).
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first outputs/second
  %(prog)s outputs/sweep                    every job of a sweep against its first
  %(prog)s outputs/sweep --all-pairs
  %(prog)s outputs/first outputs/second --json | jq .pairs

Exit codes: 0 compared; 2 the command line is wrong, or a run cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "runs", type=run_path, nargs="+", metavar="RUN", help=f"a run directory, or a sweep folder; {MEANING}"
    )
    parser.add_argument(
        "--threshold", type=_number, default=THRESHOLD, help="the reward from which on an attempt has passed (1.0)"
    )
    parser.add_argument(
        "--alpha",
        type=_probability,
        default=ALPHA,
        help="the p-value below which a difference counts as one; intervals are of 1 - alpha (0.05)",
    )
    parser.add_argument("--all-pairs", action="store_true", help="every run with every other, not only with the first")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    runs = choose_runs(arguments.runs, threshold=arguments.threshold, level=1 - arguments.alpha)
    chosen = list(combinations(runs, 2)) if arguments.all_pairs else [(runs[0], run) for run in runs[1:]]
    if len(chosen) > MOST_PAIRS:
        raise ConfigError(f"{len(runs)} runs are {len(chosen):,} pairs, more than {MOST_PAIRS:,}: name fewer runs.")
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
