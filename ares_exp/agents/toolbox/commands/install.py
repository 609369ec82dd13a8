"""The command `agents install`."""

from __future__ import annotations

import argparse
import sys

from ares_exp.agents.toolbox.commands.chosen_builds import add_choice, chosen_packages
from ares_exp.agents.toolbox.installing import install
from ares_exp.agents.toolbox.placing import default_builds
from ares_exp.agents.toolbox.store import AgentStore
from ares_exp.terminal.run_command import EXIT_OK
from ares_exp.terminal.terminal import format_size

DESCRIPTION = """\
Fetches the pinned packages of agents from their vendors into the cache of this user (~/.cache/ares_exp/agents, or
below XDG_CACHE_HOME): npm packages from the registry that npm is configured for, Python packages by pip or uv. Neither
npm nor Node is needed, and nothing of a package is run. Every file is checked against a digest; a package is there
whole, or not at all. A run with `agent=NAME` does the same at its start. Some of these programs are proprietary: who
installs them accepts their vendors' terms.
"""
EPILOG = """\
Examples:
  %(prog)s claude_code codex
  %(prog)s claude_code --libc musl                    for images without glibc, such as Alpine's
  %(prog)s mini_swe_agent --python 3.12 --python 3.13 for images with these Pythons
  %(prog)s --all

What is there already is read and checked, and fetched again if it was changed.
Exit codes: 0 installed; 2 it cannot be, or the command line is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_choice(parser, verb="install")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    store = AgentStore()
    packages = chosen_packages(arguments)
    builds = [
        build
        for package in packages
        for build in default_builds(package, libc=arguments.libc, pythons=arguments.python)
    ]
    for build in builds:
        if store.place(build).exists() and store.find(build, thoroughly=True) is None:
            _say(f"{store.place(build)} is not what was installed there; it is fetched anew.")
            store.remove(build)
        found = install(build, say=_say, store=store)
        sys.stdout.write(f"{build.name} {build.version}  {found.path}  {format_size(found.size)}\n")
        sys.stdout.flush()
    return EXIT_OK


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
