"""`python -m ares_exp.trajectories`: shows, compares, converts and recovers recorded episodes."""

from __future__ import annotations

from collections.abc import Sequence

from ares_exp.errors import TrajectoryFormatError, UserError
from ares_exp.terminal.subcommands import Subcommands

PROGRAM = "python -m ares_exp.trajectories"
COMMANDS = {
    "show": "print an episode, or list those of a run",
    "diff": "tell where two episodes part",
    "convert": "write episodes in another format",
    "recover": "finish what a killed run left, and save the good part of broken files",
}
"""What each command is for; its module has that name."""

EXAMPLES = f"""\
Examples:
  {PROGRAM} show outputs/first                 the episodes of a run; the episode, if there is one
  {PROGRAM} show outputs/first/3f2a --steps 5:8
  {PROGRAM} diff outputs/first/3f2a outputs/second/91bc
  {PROGRAM} convert outputs/first episodes.parquet
  {PROGRAM} recover outputs/first --dry-run

`{PROGRAM} COMMAND --help` tells more of each.
"""


def main(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    return Subcommands(
        PROGRAM,
        package="ares_exp.trajectories.commands",
        commands=COMMANDS,
        description=__doc__,
        examples=EXAMPLES,
        mistakes=(UserError, TrajectoryFormatError),
    ).main(argv)
