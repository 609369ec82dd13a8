"""The commands of `ares-exp`, each in one line. Their modules are imported when they are called.

The order is that of the help. `ares_exp.commands.cli.run_command` says what a module of a command has.
"""

from __future__ import annotations

from collections.abc import Mapping

from ares_exp.commands.cli.run_command import CommandModule

COMMANDS: Mapping[str, CommandModule] = {
    "list": CommandModule("list what can be chosen, and the tasks of an environment", "ares_exp.commands.list"),
    "task": CommandModule("make a task; check whether the tests of tasks test", "ares_exp.commands.task"),
    "agents": CommandModule("list, install and remove the packages of agents", "ares_exp.commands.agents"),
    "show": CommandModule("print an episode, or list the episodes of a run", "ares_exp.commands.show"),
    "compare": CommandModule("compare runs, the jobs of a sweep, or two episodes", "ares_exp.commands.compare"),
    "view": CommandModule("show runs in the browser, live", "ares_exp.commands.view"),
    "report": CommandModule("write one HTML file that shows a run", "ares_exp.commands.report"),
    "export": CommandModule("write a run in another format: Parquet, training rows, …", "ares_exp.commands.export"),
    "score": CommandModule("score the finished episodes of a run again", "ares_exp.commands.score"),
    "ctl": CommandModule("show the status of a run, and send it orders", "ares_exp.commands.ctl"),
    "snapshots": CommandModule("list, show, verify and remove snapshots", "ares_exp.commands.snapshots"),
    "merge": CommandModule("merge the shards of a run into one run", "ares_exp.commands.merge"),
    "wandb": CommandModule("upload what was recorded offline; create a workspace", "ares_exp.commands.wandb"),
    "clean": CommandModule("remove what killed runs left on this machine", "ares_exp.commands.clean"),
    "train": CommandModule("train the policy on the episodes of a run", "ares_exp.commands.train"),
}
"""By what is typed behind `ares-exp`."""
