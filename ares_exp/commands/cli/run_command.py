"""The commands of `ares-exp`, the interface of their modules, and the parsing and running of commands.

The module `ares_exp.commands.NAME` is imported when the command NAME is called. It contains

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
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from ares_exp.errors import SnapshotError, TrajectoryFormatError, UntrainableError, UserError, close_matches
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import run_path
from ares_exp.records.run_dir import EPISODES
from ares_exp.records.terminal_text import printable

COMMANDS: Mapping[str, str] = {
    "list": "list available options, and the tasks of an environment",
    "task": "create a task, check its tests, or open a shell in it",
    "agents": "list, install, pack and remove the packages of agents",
    "show": "print an episode, or list the episodes of a run",
    "compare": "compare runs, the jobs of a sweep, or two episodes",
    "view": "show runs in the browser, live",
    "report": "write one HTML file that shows a run",
    "export": "write a run in another format: Parquet, training rows, …",
    "score": "score the finished episodes of a run again",
    "ctl": "show the status of a run, or pause, change or stop it",
    "snapshots": "list, show, verify and remove snapshots",
    "merge": "merge the shards of a run into one run",
    "wandb": "upload offline W&B runs, or create a W&B workspace",
    "clean": "remove leftovers of killed runs from this machine",
    "serve": "run episodes for trainers in other processes, over HTTP",
}
"""Descriptions of the commands by name, in the order of the help."""
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
    """Parses the arguments of a command. Keeps the line breaks of help texts, and rejects abbreviated options.

    Attributes:
        declared: The arguments of the command.
        below: Parsers of the subcommands, by name.
    """

    def __init__(self, prog: str, text: str) -> None:
        self.declared: list[argparse.Action] = []
        start, _, end = text.partition("[arguments]\n")
        super().__init__(
            prog,
            description=start,
            epilog=end,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.below: dict[str, CommandParser] = {}

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Adds an argument, which is also appended to `declared`."""
        self.declared.append(action := super().add_argument(*names, **settings))
        return action

    def add_argument_group(self, *texts: Any, **settings: Any) -> Any:
        """Adds a group of arguments, which are also appended to `declared`."""
        return self._declaring(super().add_argument_group(*texts, **settings))

    def add_mutually_exclusive_group(self, **settings: Any) -> Any:
        """Adds a group of arguments, which are also appended to `declared`. Only one of them can be used."""
        return self._declaring(super().add_mutually_exclusive_group(**settings))

    def _declaring(self, group: Any) -> Any:
        add = group.add_argument
        group.add_argument = lambda *names, **settings: self.declared.append(add(*names, **settings))
        return group

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

    def candidates(self, typed: Sequence[str], last: str) -> list[str]:
        """Returns the candidates for Tab completion of the word that starts with `last`, after the words `typed`.

        The candidates are options, subcommands, paths or choices. There are none if the expected argument is, for
        example, a name or a number.
        """
        if typed and typed[0] in self.below:
            return self.below[typed[0]].candidates(typed[1:], last)
        options = {name: action for action in self.declared for name in action.option_strings}
        positionals = [action for action in self.declared if not action.option_strings]
        place, asks = 0, None
        for word in typed:
            option = None if asks is not None else options.get(word)
            place += asks is None and option is None
            asks = option if option is not None and option.nargs != 0 else None  # an option with `nargs=0` has no value
        if asks is None and last.startswith("-"):
            found = [*options]
        elif self.below and not typed:
            found = [*self.below]
        else:
            if asks is None and positionals and (place < len(positionals) or positionals[-1].nargs is not None):
                asks = positionals[min(place, len(positionals) - 1)]
            if asks is None:
                return []
            if asks.type in (Path, run_path) or asks.metavar in ("PATH", "TASK"):
                return paths(last)
            found = [*map(str, asks.choices or ())]
        return [word for word in found if word.startswith(last)]


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--config-dir`, whose value is a list of folders."""
    parser.add_argument(
        "--config-dir",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder with your own options, as for a run; repeatable",
    )


def print_line(text: str) -> None:
    """Prints a line of a command's result to stdout."""
    sys.stdout.write(f"{text}\n")


def print_progress(text: str) -> None:
    """Prints a line about the progress of a command to stderr."""
    sys.stderr.write(f"{text}\n")


def parser_of(name: str, program: str) -> CommandParser:
    """Returns the parser of the command `name`. Its help calls the command `program`, such as `ares-exp show`."""
    command = import_module(f"ares_exp.commands.{name}")
    parser = CommandParser(program, command.HELP)
    command.add_arguments(parser)
    return parser


def run_command(name: str, argv: Sequence[str], program: str) -> int:
    """Runs the command `name` with the arguments `argv`; returns the exit code. Prints user errors.

    `program` is the name of the command in messages, such as `ares-exp show`.
    """
    logging.getLogger("ares_exp").addHandler(logging.NullHandler())  # the commands print their own warnings
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # files can contain characters that the terminal cannot show
    try:
        arguments = parser_of(name, program).parse(argv)
        act = arguments.act if "act" in arguments else import_module(f"ares_exp.commands.{name}").run
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
