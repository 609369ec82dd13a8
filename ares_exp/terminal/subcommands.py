"""Commands, each a module, and programs of several of them.

The texts of a command name it by `%(prog)s`, which becomes what was typed: `ares-exp show`, or
`python -m ares_exp show`. Texts and messages that name another command say `ares-exp …`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, Self, cast

from ares_exp.errors import close_matches
from ares_exp.terminal.run_command import EXIT_OK, command_parser, guarded


class Command(Protocol):
    """A module that is a command.

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
        """Runs the command and returns its exit code; errors that are the user's are raised."""
        ...


class Runnable(Protocol):
    """What a command line is passed on to."""

    @property
    def about(self) -> str:
        """What it is for, in a line of the help that lists it."""
        ...

    def main(self, argv: Sequence[str], program: str) -> int:
        """Runs the words behind `program`, which is what was typed until here; returns the exit code."""
        ...

    def candidates(self, typed: Sequence[str], last: str) -> Sequence[str]:
        """Returns what may follow at a press of Tab.

        Args:
            typed: The whole words behind the command.
            last: What is typed of the next one.
        """
        ...


@dataclass(frozen=True, slots=True)
class CommandModule:
    """A command by the name of its module, which is imported when it is called.

    Attributes:
        about: What it is for, in a line of the help that lists it.
        module: The module, a `Command`.
    """

    about: str
    module: str

    def main(self, argv: Sequence[str], program: str) -> int:
        """Runs a command line and returns its exit code."""
        return run_module(self.module, argv, program)

    def candidates(self, typed: Sequence[str], last: str) -> Sequence[str]:
        """Returns its options, or the words that may stand there."""
        command = cast("Command", import_module(self.module))
        declared = _Declared()
        command.add_arguments(cast("argparse.ArgumentParser", declared))
        return [word for word in _expected(declared, typed, last) if word.startswith(last)]


@dataclass(frozen=True, slots=True)
class Subcommands:
    """Several commands under one name.

    Attributes:
        about: What they are for, in a line of the help that lists them.
        commands: Each, by its name.
        description: What their help begins with.
        examples: The end of their help.
    """

    about: str
    commands: Mapping[str, Runnable]
    description: str
    examples: str

    def main(self, argv: Sequence[str], program: str) -> int:
        """Runs a command line and returns its exit code."""
        if argv and argv[0] in self.commands:
            return self.commands[argv[0]].main(argv[1:], f"{program} {argv[0]}")
        return guarded(lambda: self._parse_without_command(argv, program))

    def candidates(self, typed: Sequence[str], last: str) -> Sequence[str]:
        """Returns the names of the commands, or what may follow one of them."""
        if typed and typed[0] in self.commands:
            return self.commands[typed[0]].candidates(typed[1:], last)
        return [] if typed else [name for name in self.commands if name.startswith(last)]

    def _parse_without_command(self, argv: Sequence[str], program: str) -> int:
        """Prints the help, or what is wrong."""
        parser = command_parser(program, self.description, self.examples)
        if argv and not argv[0].startswith("-"):
            near = close_matches(argv[0], self.commands)
            parser.error(f"there is no command {argv[0]!r}.{near} Expected one of {', '.join(self.commands)}.")
        commands = parser.add_subparsers(metavar="COMMAND", required=True)
        for name, command in self.commands.items():
            commands.add_parser(name, help=command.about)
        parser.parse_args(argv)
        return EXIT_OK


def run_module(module: str, argv: Sequence[str], program: str) -> int:
    """Runs a command line of a module that is a `Command`, and returns its exit code."""
    return guarded(lambda: _run(cast("Command", import_module(module)), argv, program))


def _run(command: Command, argv: Sequence[str], program: str) -> int:
    parser = command_parser(program, command.DESCRIPTION, command.EPILOG)
    command.add_arguments(parser)
    return command.run(parser.parse_intermixed_args(argv))


_HELP: Mapping[str, Any] = {"action": "help"}


class _Declared:
    """The arguments that a command declares, kept for completion: it stands in for the parser and for its groups."""

    def __init__(self) -> None:
        self.options: dict[str, Mapping[str, Any]] = {"-h": _HELP, "--help": _HELP}
        self.positionals: list[Mapping[str, Any]] = []

    def add_argument(self, *names: str, **settings: Any) -> None:
        """As `ArgumentParser.add_argument`."""
        if names[0].startswith("-"):
            self.options |= dict.fromkeys(names, settings)
        else:
            self.positionals.append(settings)

    def add_argument_group(self, *_: str) -> Self:
        """As that of a parser."""
        return self

    def add_mutually_exclusive_group(self) -> Self:
        """As that of a parser."""
        return self


def _expected(declared: _Declared, typed: Sequence[str], last: str) -> Sequence[str]:
    """Returns the words that a command knows of for the place of `last`; none for paths, names and numbers."""
    place, asks = 0, None
    for word in typed:
        if asks is None and word not in declared.options:
            place += 1
        asks = declared.options.get(word) if asks is None else None
        if asks is not None and asks.get("action", "append") != "append":  # it takes no value
            asks = None
    if asks is None and last.startswith("-"):
        return [*declared.options]
    if asks is None:
        asks = declared.positionals[place] if place < len(declared.positionals) else {}
    return [*map(str, asks.get("choices") or ())]
