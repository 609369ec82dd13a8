"""The interface of command modules, and the parsing and running of commands.

The module of a command is imported when the command is called. It contains

- `HELP`: the help text. Its line `[arguments]` is replaced by the list of arguments.
- `add_arguments(parser)`: declares the arguments or the subcommands on a `CommandParser`.
- `run(arguments)`, if the command has no subcommands: returns the exit code (`None` is 0), and raises user errors.

Help texts refer to the command as `%(prog)s`, which becomes the typed command: `ares-exp show` or
`python -m ares_exp show`. Help texts and messages that refer to another command contain `ares-exp …`.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

from ares_exp.errors import SnapshotError, TrajectoryFormatError, UntrainableError, UserError, close_matches
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import run_path
from ares_exp.records.run_dir import EPISODES
from ares_exp.records.terminal_text import printable

EXIT_PIPE_CLOSED = 141
"""Exit code if the reader of the output has closed the pipe, as if SIGPIPE had ended the program.

The command may not have completed, so exit code 0 could be wrong.
"""
MISTAKES = (UserError, TrajectoryFormatError, SnapshotError, UntrainableError)
"""Exceptions that are printed as an error message without a traceback, with exit code 2."""


Number = TypeVar("Number", int, float)


def number_type(kind: Callable[[str], Number], least: float, most: float, expected: str) -> Callable[[str], Number]:
    """Returns an argument type for `add_argument`, for numbers from `least` to `most`.

    `expected` describes valid numbers in the error message, such as `a port from 0 to 65535`.
    """

    def convert(text: str) -> Number:
        with suppress(ValueError):
            if least <= (number := kind(text)) <= most:
                return number
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return convert


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of a command. Keeps the line breaks of help texts, and rejects abbreviated options."""

    def __init__(self, prog: str, text: str) -> None:
        start, _, end = text.partition("[arguments]\n")
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=start, epilog=end, formatter_class=layout, allow_abbrev=False)
        self.below: dict[str, CommandParser] = {}

    def add_command(
        self, name: str, act: Callable[[argparse.Namespace], int | None], about: str, text: str
    ) -> CommandParser:
        """Adds a subcommand, such as `list` of `ares-exp agents`, and returns its parser.

        `act` runs the subcommand, `text` is its help, and `about` describes it in the help of this command.
        """
        self.below[name] = CommandParser(f"{self.prog} {name}", text)
        self.below[name].set_defaults(act=act, about=about)
        return self.below[name]

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses the words after the command, with options at any position. Exits after the help or a usage error."""
        if not self.below:
            return self.parse_intermixed_args(words)
        if words and words[0] in self.below:
            return self.below[words[0]].parse(words[1:])
        listed = self.add_subparsers(metavar="COMMAND", required=True, parser_class=argparse.ArgumentParser)
        for name, command in self.below.items():
            listed.add_parser(name, help=command.get_default("about"))
        if words and not words[0].startswith("-"):
            near = close_matches(words[0], self.below)
            self.error(f"there is no command {words[0]!r}.{near} Expected one of {', '.join(self.below)}.")
        return self.parse_args(words)


@dataclass(frozen=True, slots=True)
class CommandModule:
    """A command of `ares-exp`. `about` describes it in the help, and `module` is the name of its module."""

    about: str
    module: str

    def main(self, argv: Sequence[str], program: str) -> int:
        """Runs the command with `argv` and returns the exit code. `program` is the command's name in messages."""
        return run_module(self.module, argv, program)

    def candidates(self, typed: Sequence[str], last: str) -> Sequence[str]:
        """Returns the candidates for Tab completion of the word that starts with `last`, after the words `typed`."""
        declared = _Declared()
        import_module(self.module).add_arguments(declared)
        if typed and typed[0] in declared.below:
            declared, typed = declared.below[typed[0]], typed[1:]
        return [word for word in _expected(declared, typed, last) if word.startswith(last)]


def parser_of(module: str, program: str) -> CommandParser:
    """Returns the parser for the command in `module`. Its help calls the command `program`, such as `ares-exp show`."""
    command = import_module(module)
    parser = CommandParser(program, command.HELP)
    command.add_arguments(parser)
    return parser


def run_module(module: str, argv: Sequence[str], program: str) -> int:
    """Runs the command in `module` with the arguments `argv`; returns the exit code. Prints user errors."""
    logging.getLogger("ares_exp").addHandler(logging.NullHandler())  # the commands print their own warnings
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # files can contain characters that the terminal cannot show
    try:
        arguments = parser_of(module, program).parse(argv)
        act = arguments.act if "act" in arguments else import_module(module).run
        code: int | None = act(arguments)
        sys.stdout.flush()
        return code or exit_codes.COMPLETE
    except MISTAKES as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return exit_codes.USAGE
    except BrokenPipeError:  # the reader of the output, such as `head`, closed it
        _close_stdout()
        return EXIT_PIPE_CLOSED
    except OSError as error:  # an error without a file name is from stdout, for example on a full disk
        if error.filename is None:
            _close_stdout()
        sys.stderr.write(f"error: {error.filename or 'Cannot write the output'}: {error.strerror or error}.\n")
        return exit_codes.USAGE
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


def _close_stdout() -> None:
    """Discards the buffered output. Otherwise, Python would try to write it to the closed pipe and report an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Declared:
    """A stand-in for a `CommandParser` that only collects the declared arguments, for Tab completion."""

    def __init__(self) -> None:
        self.options: dict[str, Mapping[str, Any]] = {name: {"action": "help"} for name in ("-h", "--help")}
        self.positionals: list[Mapping[str, Any]] = []
        self.below: dict[str, _Declared] = {}

    def add_argument(self, *names: str, **settings: Any) -> None:
        if names[0].startswith("-"):
            self.options |= dict.fromkeys(names, settings)
        else:
            self.positionals.append(settings)

    def add_command(self, name: str, *_: object) -> _Declared:
        self.positionals[:] = [{"choices": self.below}]
        return self.below.setdefault(name, _Declared())

    def add_argument_group(self, *_: str) -> Self:
        return self

    def add_mutually_exclusive_group(self) -> Self:
        return self


def _expected(declared: _Declared, typed: Sequence[str], last: str) -> Sequence[str]:
    """Returns the candidates for the last word: options, paths or choices, depending on the expected argument.

    Empty if the expected argument is, for example, a name or a number.
    """
    place, asks = 0, None
    for word in typed:
        if asks is None and word not in declared.options:
            place += 1
        asks = declared.options.get(word) if asks is None else None
        if asks is not None and asks.get("action", "append") != "append":  # the option has no value
            asks = None
    if asks is None and last.startswith("-"):
        return [*declared.options]
    if asks is None:
        asks = {}
        if declared.positionals and (place < len(declared.positionals) or "nargs" in declared.positionals[-1]):
            asks = declared.positionals[min(place, len(declared.positionals) - 1)]
    if asks.get("type") in (Path, run_path) or asks.get("metavar") in ("PATH", "TASK"):
        return paths(last)
    return [*map(str, asks.get("choices") or ())]


def paths(typed: str) -> list[str]:
    """Returns the paths that start with the typed text. In a run directory, also returns episodes (`RUN/TASK__1`)."""
    above = typed[: typed.rfind("/") + 1]
    found: list[str] = []
    with suppress(OSError, UserError), redirect_stderr(io.StringIO()):  # `run_path` prints which run is `latest`
        folder = run_path(above or ".").expanduser()
        found += [f"{one.name}/" if one.is_dir() else one.name for one in folder.iterdir() if one.name[0] != "."]
        rows = (folder / EPISODES).read_text(errors="replace")
        found += {episode.rpartition("__")[0] for episode in re.findall(r'"episode_id": ?"([^"/]+)"', rows)}
    return sorted(f"{above}{name}" for name in found if f"{above}{name}".startswith(typed) and " " not in name)
