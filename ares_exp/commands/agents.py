"""The command `agents`: the packages of agents that are installed on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ares_exp.agents.toolbox.installing import install
from ares_exp.agents.toolbox.package import PACKAGES, PYTHONS, AgentPackage, Build, package_named
from ares_exp.agents.toolbox.package_store import AgentStore
from ares_exp.agents.toolbox.placing import default_builds
from ares_exp.commands.cli.run_command import EXIT_OK, CommandParser
from ares_exp.errors import ConfigError
from ares_exp.records.terminal_text import columns_that_fit, format_size, make_console, make_table

DESCRIPTION = """\
Lists, installs and removes the packages of agents in the cache of this user (~/.cache/ares_exp/agents, or below
XDG_CACHE_HOME).
"""
EPILOG = """\
Examples:
  %(prog)s list
  %(prog)s install claude_code codex
  %(prog)s install mini_swe_agent --python 3.12
  %(prog)s remove --all

`%(prog)s COMMAND --help` lists the options of each command.
"""
LIST = """\
Lists the agents that can be installed for this machine: the pinned version, the size of the download, which builds are
installed and how much disk space they use, the licence, and the wire formats. A build is for one C library. A build of
an agent in Python is also for one minor version of Python.
"""
LIST_EXAMPLES = """\
Examples:
  %(prog)s
  %(prog)s --json

Exit codes: 0 listed.
"""
INSTALL = """\
Fetches the pinned packages of agents from their vendors into the cache of this user: npm packages from the registry
`npm_config_registry`, Python packages by pip or uv. Neither npm nor Node is needed, and no code of a package is
run. Every file is checked against a digest, and a package is installed atomically. A run with `agent=NAME` does the
same at its start. Some of these programs are proprietary: if you install them, you accept their vendors' terms.
"""
INSTALL_EXAMPLES = """\
Examples:
  %(prog)s claude_code codex
  %(prog)s claude_code --libc musl                    for images without glibc, such as Alpine's
  %(prog)s mini_swe_agent --python 3.12 --python 3.13 for images with these Pythons
  %(prog)s --all

Installed packages are checked, and fetched again if they were changed.
Exit codes: 0 installed; 2 a package cannot be installed, or the command line is wrong.
"""
REMOVE = """\
Removes packages of agents from the cache of this user: every build of the named agents, or only the builds for one C
library or Python. Packages that a running process uses are kept.
"""
REMOVE_EXAMPLES = """\
Examples:
  %(prog)s claude_code
  %(prog)s --all

Exit codes: 0 removed; 2 a package is in use, or the command line is wrong.
"""
_TEXTS = ("agent", "installed", "licence", "wires", "needs")


def add_arguments(parser: CommandParser) -> None:
    """Declares the arguments of the command."""
    listing = parser.add_command(
        "list", _list, about="list the agents that can be installed", description=LIST, epilog=LIST_EXAMPLES
    )
    listing.add_argument("--json", action="store_true", help="as JSON, with the directory of each build")
    for verb, act, about, description, epilog in (
        ("install", _install, "fetch the packages of agents into the user's cache", INSTALL, INSTALL_EXAMPLES),
        ("remove", _remove, "remove packages of agents from the user's cache", REMOVE, REMOVE_EXAMPLES),
    ):
        command = parser.add_command(verb, act, about=about, description=description, epilog=epilog)
        command.add_argument("agents", nargs="*", metavar="AGENT", help=f"agents to {verb}: {', '.join(PACKAGES)}")
        command.add_argument("--all", action="store_true", help="every agent")
        command.add_argument("--libc", choices=("glibc", "musl"), help="only the build for that C library")
        command.add_argument(
            "--python",
            action="append",
            default=[],
            choices=PYTHONS,
            metavar="3.N",
            help="for agents in Python: only the build for that minor version; repeatable",
        )


def _list(arguments: argparse.Namespace) -> int:
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


def _install(arguments: argparse.Namespace) -> int:
    store = AgentStore()
    packages = _chosen(arguments)
    builds = [
        build
        for package in packages
        for build in default_builds(package, libc=arguments.libc, pythons=arguments.python)
    ]
    for build in builds:
        if store.place(build).exists() and store.find(build, thoroughly=True) is None:
            _say(f"{store.place(build)} was changed after its installation, and is fetched again.")
            store.remove(build)
        found = install(build, say=_say, store=store)
        sys.stdout.write(f"{build.name} {build.version}  {found.path}  {format_size(found.size)}\n")
        sys.stdout.flush()
    return EXIT_OK


def _remove(arguments: argparse.Namespace) -> int:
    store = AgentStore()
    builds = [
        build
        for package in _chosen(arguments)
        for build in package.builds
        if arguments.libc in (None, build.libc) and (not arguments.python or build.python in arguments.python)
    ]
    removed = [build for build in builds if store.remove(build)]
    for build in removed:
        sys.stdout.write(f"removed {store.place(build)}\n")
    if not removed:
        sys.stdout.write("None of these packages is installed.\n")
    return EXIT_OK


def _chosen(arguments: argparse.Namespace) -> list[AgentPackage]:
    """Returns the packages that the arguments name.

    Raises:
        ConfigError: No package is named, or a named package does not exist.
    """
    if arguments.all:
        return list(PACKAGES.values())
    if not arguments.agents:
        raise ConfigError(f"Expected the name of an agent, one of {', '.join(PACKAGES)}, or `--all`.")
    return [package_named(name) for name in arguments.agents]


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
