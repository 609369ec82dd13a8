"""The command `list`: snapshots, oldest first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from ares_exp.errors import SnapshotMetadataError
from ares_exp.records.latest_run import run_path
from ares_exp.snapshots.chosen_snapshots import HELP, chosen_snapshots
from ares_exp.snapshots.commands import words
from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.snapshots.store import in_order
from ares_exp.terminal.table import columns_that_fit, make_table
from ares_exp.terminal.terminal import format_size, make_console, one_line, printable

EXIT_OK, EXIT_DAMAGED = 0, 1
LEFT_OUT_WHERE_NARROW = ("lineage", "task", "created", "entries", "bytes", "backend")
"""Columns that a terminal too narrow for all goes without, one after the other."""

DESCRIPTION = """\
Lists snapshots, oldest first: how many policy answers had been applied (step), how many paths the container has changed
(entries) and how large its changed files are (bytes), and what the episode was branched off (lineage).
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/first/hello__0

Exit codes: 0 all could be read; 1 some could not; 2 the command line is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("paths", nargs="+", type=run_path, metavar="PATH", help=HELP)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    snapshots, problems = [], []
    for chosen in [chosen_snapshots(path) for path in arguments.paths]:
        for name in chosen.ids:
            try:
                snapshots.append(chosen.store.get(name))
            except SnapshotMetadataError as error:
                problems.append(str(error))
    console = make_console()
    if snapshots:
        fitting = columns_that_fit(list_columns(in_order(snapshots)), console.width, leave_out=LEFT_OUT_WHERE_NARROW)
        console.print(make_table(fitting, texts=_TEXTS))
    console.print(f"{len(snapshots)} snapshots")
    for problem in problems:
        sys.stderr.write(f"left out: {printable(problem)}\n")
    return EXIT_DAMAGED if problems else EXIT_OK


def list_columns(snapshots: Sequence[EnvironmentSnapshot]) -> dict[str, Sequence[str]]:
    """Returns the cells of a list of snapshots by the names of their columns."""
    return {name: [cell(snapshot) for snapshot in snapshots] for name, cell in _CELLS.items()}


_CELLS: Mapping[str, Callable[[EnvironmentSnapshot], str]] = {
    "snapshot": lambda snapshot: snapshot.snapshot_id,
    "step": lambda snapshot: str(snapshot.step_count),
    "task": words.task_name,
    "backend": lambda snapshot: one_line(snapshot.container_type),
    "created": words.moment,
    "entries": lambda snapshot: f"{snapshot.filesystem_entries:,}",
    "bytes": lambda snapshot: format_size(snapshot.filesystem_bytes),
    "lineage": words.came_from,
}
_TEXTS = ("snapshot", "task", "backend", "lineage")
