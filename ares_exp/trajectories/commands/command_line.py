"""`python -m ares_exp.trajectories`: shows, compares and converts recorded episodes."""

from __future__ import annotations

from collections.abc import Sequence

from ares_exp.terminal.subcommands import CommandModule, Subcommands

PROGRAM = "python -m ares_exp.trajectories"
COMMANDS = {
    "show": CommandModule("print an episode, or list those of a run", "ares_exp.trajectories.commands.show"),
    "diff": CommandModule("tell where two episodes part", "ares_exp.trajectories.commands.diff"),
    "convert": CommandModule("write episodes in another format", "ares_exp.trajectories.commands.convert"),
}
EXAMPLES = """\
Examples:
  %(prog)s show outputs/first                 the episodes of a run; the episode, if there is one
  %(prog)s show outputs/first/3f2a --steps 5:8
  %(prog)s diff outputs/first/3f2a outputs/second/91bc
  %(prog)s convert outputs/first episodes.parquet

`%(prog)s COMMAND --help` tells more of each.
"""

SUBCOMMANDS = Subcommands(
    "show, compare and convert recorded episodes",
    commands=COMMANDS,
    description="Shows, compares and converts recorded episodes.",
    examples=EXAMPLES,
)


def main(argv: Sequence[str], program: str = PROGRAM) -> int:
    """Runs a command line and returns its exit code."""
    return SUBCOMMANDS.main(argv, program)
