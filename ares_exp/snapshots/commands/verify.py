"""The command `verify`: whether all objects of a snapshot are there, and undamaged."""

from __future__ import annotations

import argparse
import sys

from ares_exp.records.latest_run import run_path
from ares_exp.snapshots.chosen_snapshots import HELP, chosen_snapshots
from ares_exp.terminal.terminal import format_size, one_line, printable

EXIT_OK, EXIT_DAMAGED = 0, 1

DESCRIPTION = """\
Reads everything that snapshots need, and compares it with what its name, their metadata and their checksums say.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/first/hello__0__3f2a91bc@7

Exit codes: 0 all are whole; 1 something is wrong; 2 the command line is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("paths", nargs="+", type=run_path, metavar="PATH", help=HELP)
    parser.add_argument(
        "--quick", action="store_true", help="see that the contents of files are there, do not read them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    damaged = count = 0
    for chosen in [chosen_snapshots(path) for path in arguments.paths]:
        for name in chosen.ids:
            found = chosen.store.verify(name, deep=not arguments.quick)
            count += 1
            damaged += not found.ok
            says = f"whole  {found.objects:,} objects, {format_size(found.bytes)}" if found.ok else "DAMAGED"
            sys.stdout.write(f"{one_line(name)}  {says}\n")
            sys.stdout.writelines(f"  {printable(line)}\n" for line in found.problems)
    sys.stdout.write(f"{count - damaged} of {count} snapshots are whole.\n")
    return EXIT_DAMAGED if damaged else EXIT_OK
