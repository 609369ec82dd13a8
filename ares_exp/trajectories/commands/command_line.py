"""`python -m ares_exp.trajectories`: looks at recorded episodes, compares, converts and recovers them."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ares_exp.errors import TrajectoryFormatError, UserError

EXIT_OK, EXIT_USAGE, EXIT_INTERRUPTED = 0, 2, 130
EXIT_PIPE_CLOSED = 141
"""What a shell says of a program that SIGPIPE ended: 0 would mean equal, or all done, which nobody knows."""
PROGRAM = "python -m ares_exp.trajectories"
COMMANDS = {
    "show": "print an episode, or list those of a run",
    "diff": "tell where two episodes part",
    "convert": "write episodes in another format",
    "recover": "finish what a killed run left, and save the good part of broken files",
}
"""What each command is for. The module of that name has its `add_arguments` and `run`, and maybe texts for its help."""

EXAMPLES = f"""\
Examples:
  {PROGRAM} show outputs/first                 the episodes of a run; the episode, if there is one
  {PROGRAM} show outputs/first/3f2a --steps 5:8
  {PROGRAM} diff outputs/first/3f2a outputs/second/91bc
  {PROGRAM} convert outputs/first episodes.parquet
  {PROGRAM} recover outputs/first --dry-run

`{PROGRAM} COMMAND --help` tells more of each.
"""


def main(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    logging.getLogger("ares_exp").addHandler(logging.NullHandler())  # the commands say themselves what is left out
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an episode may say what the terminal cannot show
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except (UserError, TrajectoryFormatError) as error:
        sys.stderr.write(f"error: {error}\n")
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


def _close_stdout() -> None:
    """Sends what is left in its buffer nowhere: else Python complains at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        return _parse_without_command(argv)
    name = argv[0]
    command = import_module(f"ares_exp.trajectories.commands.{name}")
    parser = argparse.ArgumentParser(
        f"{PROGRAM} {name}",
        description=getattr(command, "DESCRIPTION", f"{COMMANDS[name]}."),
        epilog=getattr(command, "EPILOG", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    code: int = command.run(parser.parse_args(argv[1:]))
    return code


def _parse_without_command(argv: Sequence[str]) -> int:
    """Prints the help, or what is wrong."""
    parser = argparse.ArgumentParser(
        PROGRAM,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about)
    parser.parse_args(argv)
    return EXIT_OK
