"""A command line of several commands, each a module: its help, its exit codes, and how errors are told."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from ares_exp.command_line.terminal import printable

EXIT_OK, EXIT_USAGE, EXIT_INTERRUPTED = 0, 2, 130
EXIT_PIPE_CLOSED = 141
"""What a shell says of a program that SIGPIPE ended: 0 would mean equal, or all done, which nobody knows."""


@dataclass(frozen=True, slots=True)
class Subcommands:
    """A program, `python -m …`.

    Attributes:
        program: What its users type.
        package: Where the modules of its commands are. Each has `add_arguments` and `run`, and maybe `DESCRIPTION` and
            `EPILOG` for its help.
        commands: What each command is for, by name.
        description: What the program is for.
        examples: The end of its help.
        mistakes: Errors that are the user's: told in one paragraph, with exit code 2.
    """

    program: str
    package: str
    commands: Mapping[str, str]
    description: str
    examples: str
    mistakes: tuple[type[Exception], ...]

    def main(self, argv: Sequence[str]) -> int:
        """Runs a command line and returns its exit code."""
        logging.getLogger("ares_exp").addHandler(logging.NullHandler())  # the commands say themselves what is left out
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a file may say what the terminal cannot show
        try:
            code = self._run(argv)
            sys.stdout.flush()
            return code
        except self.mistakes as error:
            sys.stderr.write(f"error: {printable(str(error))}\n")
            return EXIT_USAGE
        except BrokenPipeError:  # whoever reads the output has seen enough, as `head` does
            _close_stdout()
            return EXIT_PIPE_CLOSED
        except OSError as error:  # without a name it is stdout, as where that goes to a full disk
            if error.filename is None:
                _close_stdout()
            sys.stderr.write(f"error: {error.filename or 'Cannot write the output'}: {error.strerror or error}.\n")
            return EXIT_USAGE
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    def _run(self, argv: Sequence[str]) -> int:
        if not argv or argv[0] not in self.commands:
            return self._parse_without_command(argv)
        name = argv[0]
        command = import_module(f"{self.package}.{name}")
        parser = argparse.ArgumentParser(
            f"{self.program} {name}",
            description=getattr(command, "DESCRIPTION", f"{self.commands[name]}."),
            epilog=getattr(command, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(parser)
        code: int = command.run(parser.parse_args(argv[1:]))
        return code

    def _parse_without_command(self, argv: Sequence[str]) -> int:
        """Prints the help, or what is wrong."""
        parser = argparse.ArgumentParser(
            self.program,
            description=self.description,
            epilog=self.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        commands = parser.add_subparsers(metavar="COMMAND", required=True)
        for name, about in self.commands.items():
            commands.add_parser(name, help=about)
        parser.parse_args(argv)
        return EXIT_OK


def _close_stdout() -> None:
    """Sends what is left in its buffer nowhere: else Python complains at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
