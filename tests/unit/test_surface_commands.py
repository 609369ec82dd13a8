"""The commands that a user meets. A new command replaces an old one, or becomes an option of one."""

from __future__ import annotations

from ares_exp.cli.commands import COMMANDS
from ares_exp.terminal.run_command import parser_of

SURFACE = {
    "list": [],
    "task": ["new", "check"],
    "agents": ["list", "install", "remove"],
    "show": [],
    "compare": [],
    "view": [],
    "report": [],
    "export": [],
    "ctl": [],
    "snapshots": ["list", "show", "verify", "gc"],
    "merge": [],
    "wandb": ["sync", "dashboard"],
    "clean": [],
    "train": [],
}
"""In the order of the help; a run, the fifteenth command, has no name."""


def test_the_commands_are_these() -> None:
    commands = {name: [*parser_of(command.module, name).below] for name, command in COMMANDS.items()}
    assert [*commands.items()] == [*SURFACE.items()]


def test_every_command_is_a_file_in_commands() -> None:
    modules = {name: command.module for name, command in COMMANDS.items()}
    assert modules == {name: f"ares_exp.commands.{name}" for name in modules}
