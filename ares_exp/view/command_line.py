"""The command line of `python -m ares_exp.view`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import webbrowser
from collections.abc import Sequence

from ares_exp.records.latest_run import MEANING, OUTPUTS, run_path
from ares_exp.terminal.run_command import EXIT_OK, run_module

PROGRAM = "python -m ares_exp.view"
PORT = 7580
DESCRIPTION = """\
Serves the page of `ares-exp report` to the browser of this machine: of a run, or of all runs below a folder, live while
they go on. It is a process of its own that only reads their files: it shows runs that were killed, and runs of other
machines on the same disk. With `--control` its buttons give orders to runs. Ctrl-C ends it.
"""
EPILOG = f"""\
Examples:
  %(prog)s                                  all runs below {OUTPUTS}/
  %(prog)s latest --open
  %(prog)s outputs/sweep --port 0

On another machine: `ssh -L {PORT}:127.0.0.1:{PORT} HOST`, then open the address that is printed there.

Exit codes: 0 ended by Ctrl-C; 2 the command line is wrong, or the port is taken.
"""


def main(argv: Sequence[str], program: str = PROGRAM) -> int:
    """Runs the command line and returns its exit code."""
    return run_module(__name__, argv, program)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "path",
        type=run_path,
        nargs="?",
        default=OUTPUTS,
        metavar="RUN|DIR",
        help=f"a run directory, or a folder of runs [{OUTPUTS}]; {MEANING}",
    )
    parser.add_argument("--port", type=_port, default=PORT, metavar="N", help=f"the port, 0 for a free one [{PORT}]")
    parser.add_argument("--control", action="store_true", help="buttons for orders to runs, as of `ares-exp ctl`")
    parser.add_argument("--open", action="store_true", help="open it in the browser")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command until Ctrl-C; returns its exit code."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(arguments))
    return EXIT_OK


async def _serve(arguments: argparse.Namespace) -> None:
    from ares_exp.view.server import listening
    from ares_exp.view.shelf import Shelf

    async with listening(Shelf(arguments.path), port=arguments.port, control=arguments.control) as address:
        sys.stdout.write(f"{address}\nThe page of {arguments.path}, for this machine alone; Ctrl-C ends it.\n")
        sys.stdout.flush()
        if arguments.open:
            await asyncio.to_thread(webbrowser.open, address)
        await asyncio.Event().wait()  # until Ctrl-C


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)
