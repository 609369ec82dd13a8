"""The commands of `ares-exp`: each is registered here, in one line, and imported when it is called.

A command is a module with what `ares_exp.terminal.subcommands.Command` asks for. The order is that of the help.
"""

from __future__ import annotations

from collections.abc import Mapping

from ares_exp.agents.toolbox.command_line import SUBCOMMANDS as AGENTS
from ares_exp.snapshots.commands.command_line import SUBCOMMANDS as SNAPSHOTS
from ares_exp.terminal.subcommands import CommandModule, Runnable
from ares_exp.trackers.commands.command_line import COMMANDS as OF_TRACKERS

COMMANDS: Mapping[str, Runnable] = {
    "train": CommandModule("train the policy on the episodes of a run", "ares_exp.commands.train"),
    "new-task": CommandModule("make a small task, to be edited", "ares_exp.authoring.new_task"),
    "check-task": CommandModule("tell whether the tests of tasks test", "ares_exp.commands.task"),
    "list": CommandModule("list what can be chosen, and the tasks of an environment", "ares_exp.commands.list"),
    "show": CommandModule("print an episode, or list those of a run", "ares_exp.commands.show"),
    "diff": CommandModule("tell where two episodes part", "ares_exp.trajectories.commands.diff"),
    "convert": CommandModule("write episodes in another format", "ares_exp.trajectories.commands.convert"),
    "recover": CommandModule(
        "finish what a killed run left, and save the good part of broken files",
        "ares_exp.trajectories.commands.recover",
    ),
    "sequences": CommandModule("write sampled tokens for trainers", "ares_exp.training.write_sequences"),
    "report": CommandModule("write one HTML file that shows a run", "ares_exp.commands.report"),
    "view": CommandModule("show runs in the browser, live", "ares_exp.view.command_line"),
    "ctl": CommandModule("tell how a run does, and give it orders", "ares_exp.ctl.command_line"),
    "compare": CommandModule("tell whether runs differ by more than chance", "ares_exp.commands.compare"),
    "sweeps": CommandModule("print what a sweep adds up to", "ares_exp.sweeps.command_line"),
    "merge": CommandModule("make one run of those of its shards", "ares_exp.commands.merge"),
    "export": CommandModule("write a run as a Harbor job", "ares_exp.harbor_export.command_line"),
    "snapshots": SNAPSHOTS,
    **OF_TRACKERS,
    "clean": CommandModule("remove what dead runs of this machine left", "ares_exp.commands.clean"),
    "agents": AGENTS,
    "check-part": CommandModule("run a conformance suite on a part of your own", "ares_exp.testing.command_line"),
}
"""By what is typed behind `ares-exp`."""
