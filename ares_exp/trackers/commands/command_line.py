"""`python -m ares_exp.trackers`: uploads what was recorded offline, and builds a dashboard, with Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence

from ares_exp.errors import UserError
from ares_exp.terminal.subcommands import Subcommands

PROGRAM = "python -m ares_exp.trackers"
COMMANDS = {
    "sync": "upload the W&B runs of run directories, wherever these were moved to",
    "dashboard": "build a W&B workspace that shows a group of runs",
}
"""What each command is for; its module has that name."""

EXAMPLES = f"""\
Examples:
  {PROGRAM} sync outputs/first                 upload a run that was recorded offline
  {PROGRAM} dashboard --entity my-team --project ares_exp

`{PROGRAM} COMMAND --help` tells more of each.
"""


def main(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    return Subcommands(
        PROGRAM,
        package="ares_exp.trackers.commands",
        commands=COMMANDS,
        description=__doc__,
        examples=EXAMPLES,
        mistakes=(UserError,),
    ).main(argv)
