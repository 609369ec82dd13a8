"""`ares-exp sweeps FOLDER`: what a sweep adds up to: of one that runs, has ended, or was killed."""

from __future__ import annotations

import argparse
import sys

from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.terminal.run_command import EXIT_OK

DESCRIPTION = """\
Prints what a sweep adds up to: one that runs, has ended, or was killed.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/default/2026-01-31_12-00-00
  %(prog)s outputs/grid --json | jq .best

Exit code 0, however the sweep does; 2 if there is none.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("folder", type=run_path, metavar="FOLDER", help=f"the sweep's: `hydra.sweep.dir`; {MEANING}")
    parser.add_argument("--json", action="store_true", help="print what sweep.json holds")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from ares_exp.records.run_dir import dump_json
    from ares_exp.sweeps.report import SweepReport
    from ares_exp.sweeps.report_text import render_report

    report = SweepReport.read(arguments.folder)
    if arguments.json:
        sys.stdout.write(dump_json(report.to_dict(), indent=2) + "\n")
    else:
        render_report(report, sys.stdout)
    return EXIT_OK
