"""The command `agents`: the packages of agents that are installed on this machine."""

from __future__ import annotations

from ares_exp.terminal.subcommands import CommandModule, Subcommands

_FOLDER = "ares_exp.agents.toolbox.commands"
EXAMPLES = """\
Examples:
  %(prog)s list
  %(prog)s install claude_code codex
  %(prog)s install mini_swe_agent --python 3.12
  %(prog)s remove --all

`%(prog)s COMMAND --help` tells more of each.
"""

SUBCOMMANDS = Subcommands(
    "list, install and remove the packages of agents",
    commands={
        "list": CommandModule("list the agents that can be installed, and what is there", "ares_exp.commands.agents"),
        "install": CommandModule("fetch the packages of agents into the user's cache", f"{_FOLDER}.install"),
        "remove": CommandModule("remove packages of agents from the user's cache", f"{_FOLDER}.remove"),
    },
    description="Manages the packages of agents that containers get by a read-only mount.",
    examples=EXAMPLES,
)
