"""The frame of a command line: mistakes, Ctrl-C, and output that is no longer read."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable

from ares_exp.errors import SnapshotError, TrajectoryFormatError, UntrainableError, UserError
from ares_exp.terminal.terminal import printable

EXIT_OK, EXIT_USAGE, EXIT_INTERRUPTED = 0, 2, 130
EXIT_PIPE_CLOSED = 141
"""Exit code of a program that SIGPIPE ended; 0 would mean equal, or all done, which is not known."""
MISTAKES = (UserError, TrajectoryFormatError, SnapshotError, UntrainableError)
"""Errors that are the user's, or of the files that the user named: printed as one paragraph, with exit code 2."""


def command_parser(program: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of a command line: its texts are printed as they are, and options are written out."""
    return argparse.ArgumentParser(
        program,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def guarded(act: Callable[[], int]) -> int:
    """Does `act`, which returns its own exit code, and returns the exit code."""
    logging.getLogger("ares_exp").addHandler(logging.NullHandler())  # the commands say themselves what is left out
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file may say what the terminal cannot show
    try:
        code = act()
        sys.stdout.flush()
        return code
    except MISTAKES as error:
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


def _close_stdout() -> None:
    """Sends the rest of the buffer nowhere: else Python complains at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
