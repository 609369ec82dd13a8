"""A command line of several commands, each a module, and its help."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from ares_exp.terminal.run_command import EXIT_OK, command_parser, guarded


class Command(Protocol):
    """A module that is one of the commands.

    Attributes:
        DESCRIPTION: What its help begins with.
        EPILOG: What its help ends with.
    """

    DESCRIPTION: str
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds what the command line of the command takes."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the command and returns its exit code."""
        ...


@dataclass(frozen=True, slots=True)
class Subcommands:
    """A program, `python -m …`.

    Attributes:
        program: What its users type.
        package: Where the modules of its commands are; each is a `Command`.
        commands: What each command is for, by name.
        description: What the program is for.
        examples: The end of its help.
        mistakes: Errors that are the user's: printed as one paragraph, with exit code 2.
    """

    program: str
    package: str
    commands: Mapping[str, str]
    description: str
    examples: str
    mistakes: tuple[type[Exception], ...]

    def main(self, argv: Sequence[str]) -> int:
        """Runs a command line and returns its exit code."""
        return guarded(lambda: self._run(argv), self.mistakes)

    def _run(self, argv: Sequence[str]) -> int:
        if not argv or argv[0] not in self.commands:
            return self._parse_without_command(argv)
        name = argv[0]
        command = cast("Command", import_module(f"{self.package}.{name}"))
        parser = command_parser(f"{self.program} {name}", command.DESCRIPTION, command.EPILOG)
        command.add_arguments(parser)
        return command.run(parser.parse_args(argv[1:]))

    def _parse_without_command(self, argv: Sequence[str]) -> int:
        """Prints the help, or what is wrong."""
        parser = command_parser(self.program, self.description, self.examples)
        commands = parser.add_subparsers(metavar="COMMAND", required=True)
        for name, about in self.commands.items():
            commands.add_parser(name, help=about)
        parser.parse_args(argv)
        return EXIT_OK
