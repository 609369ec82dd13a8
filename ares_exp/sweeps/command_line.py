"""`python -m ares_exp.sweeps FOLDER`: what a sweep adds up to: of one that runs, has ended, or was killed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ares_exp.errors import UserError
from ares_exp.terminal.run_command import EXIT_OK, command_parser, guarded

EPILOG = """\
Examples:
  python -m ares_exp.sweeps outputs/default/2026-01-31_12-00-00
  python -m ares_exp.sweeps outputs/grid --json | jq .best

Exit code 0, however the sweep does; 2 if there is none.
"""


def main(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    parser = command_parser("python -m ares_exp.sweeps", __doc__, EPILOG)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the sweep's: `hydra.sweep.dir`")
    parser.add_argument("--json", action="store_true", help="print what sweep.json holds")
    arguments = parser.parse_args(argv)
    return guarded(lambda: _show(arguments.folder, as_json=arguments.json), (UserError,))


def _show(folder: Path, *, as_json: bool) -> int:
    from ares_exp.records.run_dir import dump_json
    from ares_exp.sweeps.report import SweepReport
    from ares_exp.sweeps.report_text import render_report

    report = SweepReport.read(folder)
    if as_json:
        sys.stdout.write(dump_json(report.to_dict(), indent=2) + "\n")
    else:
        render_report(report, sys.stdout)
    return EXIT_OK
