"""The command line of `ares-exp report`."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path

from ares_exp.commands.cli.run_command import EXIT_OK
from ares_exp.commands.report_subject import subject_of
from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.terminal_text import count_of, format_size, printable
from ares_exp.reports.written_report import KINDS, WHICH, Written, write_report

NAME = "report.html"
SUFFIXES = (".html", ".htm")
DESCRIPTION = """\
Writes one HTML file that shows a run, a sweep, or two runs side by side: tables, pictures, trajectories with commands
and the output of the verifier. The file opens in any browser without a network. You can write it while the run
continues or after it was killed. Failures come first, and trajectories that do not fit are named.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/first outputs/second -o second.html --open
  %(prog)s outputs/sweep --episodes none
  %(prog)s latest --redact paths,env -o to-share.html

Exit codes: 0 written; 2 the command line is wrong, a run cannot be read, or the file cannot be written.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("run", type=run_path, metavar="RUN", help=f"a run directory or a sweep folder; {MEANING}")
    parser.add_argument("other", type=run_path, nargs="?", metavar="RUN2", help="a run to compare with the first")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help=f"the file; {NAME} in RUN, or here for two runs, if not given"
    )
    parser.add_argument("--max-mb", type=_size, default=25.0, metavar="N", help="the size of the file, 10^6 bytes (25)")
    parser.add_argument(
        "--episodes", choices=WHICH, default="all", help="whose steps it has, as far as they fit: failed, all or none"
    )
    parser.add_argument(
        "--redact",
        type=_kinds,
        default=(),
        metavar="WHAT",
        help="hide what tells of this machine, for a report that is handed on: paths, env, or paths,env",
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    subject = subject_of(arguments.run, arguments.other)
    out = arguments.out or (Path(NAME) if arguments.other is not None else arguments.run / NAME)
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"Expected the name of a file that ends with {' or '.join(SUFFIXES)}, got {out}.")
    written = write_report(
        subject, out, max_bytes=int(arguments.max_mb * 10**6), which=arguments.episodes, redact=arguments.redact
    )
    sys.stdout.write(_told(out, written) + "\n")
    if arguments.open:
        webbrowser.open(out.resolve().as_uri())
    return EXIT_OK


def _told(out: Path, written: Written) -> str:
    left = f", {written.left_out:,} left out: the file names them" if written.left_out else ""
    shown = count_of(written.trajectories, "trajectory", "trajectories")
    return printable(
        f"Written to {out}: {format_size(written.size)}, {count_of(written.episodes, 'episode')}, {shown}{left}."
    )


def _size(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 2000:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 2000, got {text!r}")
    return value


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(text.split(",")))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"expected {', '.join(KINDS)} or several with commas, got {unknown[0]!r}")
    return kinds
