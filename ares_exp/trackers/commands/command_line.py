"""The commands `sync` and `dashboard`, for Weights & Biases."""

from __future__ import annotations

from ares_exp.terminal.subcommands import CommandModule, Subcommands

COMMANDS = {
    "sync": CommandModule(
        "upload the W&B runs of run directories, wherever these were moved to", "ares_exp.commands.wandb"
    ),
    "dashboard": CommandModule(
        "build a W&B workspace that shows a group of runs", "ares_exp.trackers.commands.dashboard"
    ),
}
EXAMPLES = """\
Examples:
  %(prog)s sync outputs/first                 upload a run that was recorded offline
  %(prog)s dashboard --entity my-team --project ares_exp

`%(prog)s COMMAND --help` tells more of each.
"""

SUBCOMMANDS = Subcommands(
    "upload what was recorded offline, and build a dashboard, with W&B",
    commands=COMMANDS,
    description="Uploads what was recorded offline, and builds a dashboard, with Weights & Biases.",
    examples=EXAMPLES,
)
