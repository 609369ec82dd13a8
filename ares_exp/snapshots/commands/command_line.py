"""`ares-exp snapshots`: lists, shows and verifies snapshots, and removes what is not needed."""

from __future__ import annotations

from ares_exp.terminal.subcommands import CommandModule, Subcommands

COMMANDS = {
    "list": CommandModule("list snapshots", "ares_exp.snapshots.commands.list"),
    "show": CommandModule("tell what a snapshot holds, and what it does not", "ares_exp.commands.snapshots"),
    "verify": CommandModule(
        "check that all a snapshot needs is there, and undamaged", "ares_exp.snapshots.commands.verify"
    ),
    "gc": CommandModule("remove old snapshots, and what no snapshot needs", "ares_exp.snapshots.commands.gc"),
}
EXAMPLES = """\
Examples:
  %(prog)s list outputs/first                 the snapshots of a run
  %(prog)s show outputs/first/hello__0__3f2a91bc@7 --files
  %(prog)s verify outputs/first
  %(prog)s gc outputs/first --keep 1 --dry-run

`%(prog)s COMMAND --help` tells more of each.
"""

SUBCOMMANDS = Subcommands(
    "list, show and verify snapshots, and remove what is not needed",
    commands=COMMANDS,
    description="Lists, shows and verifies snapshots, and removes what is not needed.",
    examples=EXAMPLES,
)
