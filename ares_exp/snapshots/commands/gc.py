"""The command `gc`: removes old snapshots, and objects that no snapshot needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ares_exp.errors import UserError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.snapshots.chosen_snapshots import find_store
from ares_exp.snapshots.garbage import GRACE_SEC
from ares_exp.snapshots.snapshot_id import step_of
from ares_exp.snapshots.store import SnapshotStore
from ares_exp.terminal.terminal import format_size, printable

EXIT_OK, EXIT_SKIPPED = 0, 1

DESCRIPTION = """\
Removes contents that no snapshot needs any more, and what killed processes left. With --keep N it first removes all but
the last N snapshots of each episode. A store in which a snapshot is being written is left alone.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/* --keep 1 --dry-run

Exit codes: 0 done; 1 a store was left alone, as it is being written; 2 the command line is wrong, or a snapshot broken.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "paths", nargs="+", type=run_path, metavar="PATH", help=f"run directories or snapshot stores; {MEANING}"
    )
    parser.add_argument(
        "--keep", type=_at_least_1, metavar="N", help="remove all but the last N snapshots of an episode"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument(
        "--grace", type=_seconds, default=GRACE_SEC, metavar="SEC",
        help=f"leave what was written less than so many seconds ago (default {GRACE_SEC:g})",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    code = EXIT_OK
    for store in _stores(arguments.paths):
        doomed = _beyond(store, arguments.keep)
        if not arguments.dry_run:
            for name in doomed:
                store.delete(name)
        freed = store.gc(grace_sec=arguments.grace, dry_run=arguments.dry_run, without=doomed)
        where = printable(str(store.path))
        for name in doomed:
            sys.stdout.write(f"{'would remove' if arguments.dry_run else 'removed'} {where}/{name}\n")
        if freed.skipped is not None:
            sys.stderr.write(f"{printable(freed.skipped)}\n")
            code = EXIT_SKIPPED
            continue
        sys.stdout.write(
            f"{where}: {len(doomed)} snapshots, {freed.objects:,} objects of {format_size(freed.bytes)} and "
            f"{freed.directories} leftovers {'would be removed' if arguments.dry_run else 'removed'}"
            f"{f' (what is younger than {arguments.grace:g} s stays: --grace)' if arguments.grace else ''}.\n"
        )
    return code


def _stores(paths: Sequence[Path]) -> list[SnapshotStore]:
    """Returns the stores; paths without one are skipped if there are several (`outputs/*` names every run)."""
    found = {path: find_store(path) for path in paths}
    wrong = [path for path, store in found.items() if store is None and (len(found) == 1 or not path.is_dir())]
    if wrong:
        raise UserError(
            f"Expected {printable(str(wrong[0]))} to be a snapshot store, or a run directory with `snapshots/` in it."
        )
    for path in (path for path, store in found.items() if store is None):
        sys.stderr.write(f"{printable(str(path))} has no snapshots.\n")
    return [store for store in found.values() if store is not None]


def _beyond(store: SnapshotStore, keep: int | None) -> Sequence[str]:
    if keep is None:
        return []
    episodes = sorted({found[0] for name in store.ids() if (found := step_of(name)) is not None})
    return [name for episode in episodes for name in store.beyond(episode, keep)]


def _at_least_1(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text[:9]) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text[:9])


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text!r}")
    return value
