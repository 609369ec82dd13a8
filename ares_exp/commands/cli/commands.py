"""The commands of `ares-exp`. The module of a command is imported when the command is called.

The help lists the commands in this order. `ares_exp.commands.cli.run_command` describes what such a module contains.
"""

from __future__ import annotations

from collections.abc import Mapping

from ares_exp.commands.cli.run_command import CommandModule

COMMANDS: Mapping[str, CommandModule] = {
    "list": CommandModule("list available options, and the tasks of an environment", "ares_exp.commands.list"),
    "task": CommandModule("create a task, check its tests, or open a shell in it", "ares_exp.commands.task"),
    "agents": CommandModule("list, install, pack and remove the packages of agents", "ares_exp.commands.agents"),
    "show": CommandModule("print an episode, or list the episodes of a run", "ares_exp.commands.show"),
    "compare": CommandModule("compare runs, the jobs of a sweep, or two episodes", "ares_exp.commands.compare"),
    "view": CommandModule("show runs in the browser, live", "ares_exp.commands.view"),
    "report": CommandModule("write one HTML file that shows a run", "ares_exp.commands.report"),
    "export": CommandModule("write a run in another format: Parquet, training rows, …", "ares_exp.commands.export"),
    "score": CommandModule("score the finished episodes of a run again", "ares_exp.commands.score"),
    "ctl": CommandModule("show the status of a run, or pause, change or stop it", "ares_exp.commands.ctl"),
    "snapshots": CommandModule("list, show, verify and remove snapshots", "ares_exp.commands.snapshots"),
    "merge": CommandModule("merge the shards of a run into one run", "ares_exp.commands.merge"),
    "wandb": CommandModule("upload offline W&B runs, or create a W&B workspace", "ares_exp.commands.wandb"),
    "clean": CommandModule("remove leftovers of killed runs from this machine", "ares_exp.commands.clean"),
    "serve": CommandModule("run episodes for trainers in other processes, over HTTP", "ares_exp.commands.serve"),
}
"""Commands by name, as typed on the command line."""
