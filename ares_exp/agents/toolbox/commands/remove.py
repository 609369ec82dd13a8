"""The command `agents remove`."""

from __future__ import annotations

import argparse
import sys

from ares_exp.agents.toolbox.commands.chosen_builds import add_choice, chosen_packages
from ares_exp.agents.toolbox.store import AgentStore
from ares_exp.terminal.run_command import EXIT_OK

DESCRIPTION = """\
Removes packages of agents from the cache of this user: every build of the agents that are named, or those for one C
library or Python. What a running process uses is kept.
"""
EPILOG = """\
Examples:
  %(prog)s claude_code
  %(prog)s --all

Exit codes: 0 nothing of them is left; 2 one is in use, or the command line is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_choice(parser, verb="remove")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    store = AgentStore()
    builds = [
        build
        for package in chosen_packages(arguments)
        for build in package.builds
        if arguments.libc in (None, build.libc) and (not arguments.python or build.python in arguments.python)
    ]
    removed = [build for build in builds if store.remove(build)]
    for build in removed:
        sys.stdout.write(f"removed {store.place(build)}\n")
    if not removed:
        sys.stdout.write("Nothing of that is installed.\n")
    return EXIT_OK
