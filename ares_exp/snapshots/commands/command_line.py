"""`python -m ares_exp.snapshots`: lists, shows and verifies snapshots, and removes what is not needed."""

from __future__ import annotations

from collections.abc import Sequence

from ares_exp.errors import SnapshotError, UserError
from ares_exp.terminal.subcommands import Subcommands

PROGRAM = "python -m ares_exp.snapshots"
COMMANDS = {
    "list": "list snapshots",
    "show": "tell what a snapshot holds, and what it does not",
    "verify": "check that all a snapshot needs is there, and undamaged",
    "gc": "remove old snapshots, and what no snapshot needs",
}
"""What each command is for; its module has that name."""

EXAMPLES = f"""\
Examples:
  {PROGRAM} list outputs/first                 the snapshots of a run
  {PROGRAM} show outputs/first/hello__0__3f2a91bc@7 --files
  {PROGRAM} verify outputs/first
  {PROGRAM} gc outputs/first --keep 1 --dry-run

`{PROGRAM} COMMAND --help` tells more of each.
"""


def main(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    return Subcommands(
        PROGRAM,
        package="ares_exp.snapshots.commands",
        commands=COMMANDS,
        description=__doc__,
        examples=EXAMPLES,
        mistakes=(UserError, SnapshotError),
    ).main(argv)
