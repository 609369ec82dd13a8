"""`ares-exp merge OUT RUN RUN …`: makes one run directory of those of a run's shards."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.terminal.run_command import EXIT_OK

DESCRIPTION = """\
Makes one run directory, OUT, of those of a run's shards. It holds every episode and trajectory, statistics over all of
them, and the records of each shard in parts/. The shards stay as they are; where it can be, files are hard links.
"""
EPILOG = """\
Examples:
  ares-exp env.path=tasks env.tasks=@0/2 hydra.run.dir=shard0      on one machine
  ares-exp env.path=tasks env.tasks=@1/2 hydra.run.dir=shard1      on another
  %(prog)s whole shard0 shard1
  ares-exp compare whole outputs/before

Exit code 1: every RUN is in OUT, but episodes are missing or without a reward. Snapshots stay where they are.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the run directory to make")
    parser.add_argument(
        "runs", type=run_path, metavar="RUN", nargs="+", help=f"the run directory of a shard; {MEANING}"
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="KEY", help="a key that may differ in their configs"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from ares_exp.reporting.merge.merged_run import write_merged_run
    from ares_exp.reporting.merge.shards import read_shards
    from ares_exp.reporting.summary import render_summary
    from ares_exp.terminal.exit_codes import INCOMPLETE

    shards = read_shards(arguments.runs, allowed=arguments.allow)
    summary = write_merged_run(arguments.out, shards)
    for warning in shards.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    render_summary(summary, run_dir=arguments.out)
    return EXIT_OK if summary.complete else INCOMPLETE
