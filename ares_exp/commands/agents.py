"""The command `agents list`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ares_exp.agents.toolbox.package import AgentPackage, Build
from ares_exp.agents.toolbox.pinned import PACKAGES
from ares_exp.agents.toolbox.store import AgentStore
from ares_exp.terminal.run_command import EXIT_OK
from ares_exp.terminal.table import columns_that_fit, make_table
from ares_exp.terminal.terminal import format_size, make_console

DESCRIPTION = """\
Lists the agents that can be installed for this machine: the pinned version, what is fetched, which builds are there and
what they take on the disk, the licence, and the wire formats. A build is for one C library, and for agents written in
Python for one minor version of that.
"""
EPILOG = """\
Examples:
  %(prog)s
  %(prog)s --json

Exit codes: 0 listed.
"""
_TEXTS = ("agent", "installed", "licence", "wires", "needs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("--json", action="store_true", help="as JSON, with the directory of each build")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    store = AgentStore()
    if arguments.json:
        sys.stdout.write(f"{json.dumps([_as_json(package, store) for package in PACKAGES.values()], indent=2)}\n")
        return EXIT_OK
    rows = [_row(package, store) for package in PACKAGES.values()]
    console = make_console()
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    fitting = columns_that_fit(columns, console.width, leave_out=("wires", "needs", "licence"))
    console.print(make_table(fitting, texts=_TEXTS))
    return EXIT_OK


def _row(package: AgentPackage, store: AgentStore) -> dict[str, str]:
    builds = package.for_machine()
    found = [one for build in builds if (one := store.find(build)) is not None]
    there = ", ".join(one.build.variant for one in found)
    return {
        "agent": package.name,
        "version": package.version,
        "fetched": format_size(builds[0].size) if builds else "-",
        "installed": f"{there} ({format_size(sum(one.size for one in found))})" if found else "no",
        "licence": package.licence,
        "wires": ", ".join(package.wires),
        "needs": " or ".join(package.floors.values()) or "nothing",
    }


def _as_json(package: AgentPackage, store: AgentStore) -> dict[str, Any]:
    return {
        "name": package.name,
        "title": package.title,
        "version": package.version,
        "licence": package.licence,
        "wires": list(package.wires),
        "builds": [_build_as_json(package, build, store) for build in package.for_machine()],
    }


def _build_as_json(package: AgentPackage, build: Build, store: AgentStore) -> dict[str, Any]:
    found = store.find(build)
    return {
        "build": build.key,
        "libc": build.libc,
        "python": build.python,
        "needs": package.floors.get(build.libc),
        "fetched_bytes": build.size,
        "installed": str(found.path) if found is not None else None,
        "bytes": found.size if found is not None else None,
        "digest": found.digest if found is not None else None,
    }
