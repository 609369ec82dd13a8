"""The command `agents`: installs, packs, lists and removes the packages of third-party agents on this machine."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from ares_exp.agents.toolbox.installing import default_name, install, parse_spec
from ares_exp.agents.toolbox.package import (
    PACKAGE_NAME,
    PACKAGES,
    PYTHONS,
    AgentPackage,
    Build,
    Pack,
    user_package,
)
from ares_exp.agents.toolbox.package_store import AgentStore
from ares_exp.agents.toolbox.placing import default_builds
from ares_exp.commands.cli.run_command import CommandParser, print_progress
from ares_exp.errors import ConfigError, close_matches
from ares_exp.records.terminal_text import format_size, make_console, print_table

HELP = """\
Lists, installs, packs and removes the packages of agents in the cache of this user (~/.cache/ares_exp/agents, or below
XDG_CACHE_HOME).
[arguments]
Examples:
  %(prog)s list
  %(prog)s install claude_code codex
  %(prog)s install mini_swe_agent --python 3.12
  %(prog)s pack npm:@github/copilot
  %(prog)s remove --all

`%(prog)s COMMAND --help` lists the options of each command.
"""
LIST = """\
Lists the agents that can be installed for this machine: the pinned version, the size of the download, which builds are
installed and how much disk space they use, the licence, and the wire formats. Each build is for one C library, such as
glibc. A build of an agent in Python is also for one minor version of Python, such as 3.12.
[arguments]
Examples:
  %(prog)s
  %(prog)s --json

Exit codes: 0 listed.
"""
INSTALL = """\
Fetches the pinned packages of agents from their vendors into the cache of this user: npm packages from the registry
`npm_config_registry`, Python packages by pip or uv. No code of a package is run, and a package is installed atomically.
claude_code, codex, opencode, qwen_code and mini_swe_agent need neither npm nor Node.js, and each of their files is
checked against a digest. The other agents are packed from exact versions by npm or uv, as with `agents pack`. A run
with `agent=NAME` does the same at its start. If you install a proprietary program, you accept its vendor's terms.
[arguments]
Examples:
  %(prog)s claude_code codex
  %(prog)s claude_code --libc musl                    for images without glibc, such as Alpine's
  %(prog)s mini_swe_agent --python 3.12 --python 3.13 for images with these Pythons
  %(prog)s --all

Installed packages are checked, and fetched again if they were changed.
Exit codes: 0 installed; 2 a package cannot be installed, or the command line is wrong.
"""
PACK = """\
Installs a program from npm or PyPI, with its own Node.js or Python, into this user's cache, for `agent.package=NAME`.
The command needs npm or uv, and replaces an earlier package with the same name. The scripts of npm packages are not
run. The package runs in every image with glibc, whatever Node.js or Python the image has.
[arguments]
Examples:
  %(prog)s npm:@github/copilot
  %(prog)s pip:aider-chat==0.86.2 --python 3.12 --name aider
  %(prog)s npm:my-agent@1.2.3 --add npm:my-plugin --node 24

The folder `bin/` of a package contains the programs of the named packages, and `agent-node` or `agent-python`.
Exit codes: 0 packed; 2 the package cannot be packed, or the command line is wrong.
"""
REMOVE = """\
Removes packages of agents from the cache of this user: every build of the named agents, or only the builds for one C
library or Python. Packages that a running process uses are kept.
[arguments]
Examples:
  %(prog)s claude_code
  %(prog)s --all

Exit codes: 0 removed; 2 a package is in use, or the command line is wrong.
"""
_TEXTS = ("agent", "installed", "last use", "licence", "wires", "needs")


def add_arguments(parser: CommandParser) -> None:
    listing = parser.add_command("list", _list, "list the agents that can be installed", LIST)
    listing.add_argument("--json", action="store_true", help="as JSON, with the directory of each build")
    installing = parser.add_command("install", _install, "fetch the packages of agents into the user's cache", INSTALL)
    removing = parser.add_command("remove", _remove, "remove packages of agents from the user's cache", REMOVE)
    installing.add_argument("--all", action="store_true", help="all agents that need neither npm nor uv")
    removing.add_argument("--all", action="store_true", help="all agents")
    for command in (installing, removing):
        command.add_argument("agents", nargs="*", metavar="AGENT", help=f"names of agents: {', '.join(PACKAGES)}")
        command.add_argument("--libc", choices=("glibc", "musl"), help="only the build for this C library")
        command.add_argument(
            "--python",
            action="append",
            default=[],
            choices=PYTHONS,
            metavar="3.N",
            help="for Python agents: only the build for this Python version; repeatable",
        )
    packing = parser.add_command("pack", _pack, "pack any program from npm or PyPI", PACK)
    packing.add_argument("spec", metavar="SPEC", help="npm:PACKAGE[@VERSION] or pip:PACKAGE[==VERSION]")
    packing.add_argument("--add", action="append", default=[], metavar="SPEC", help="another package; repeatable")
    packing.add_argument("--name", help="name for agent.package (default: the name of the package)")
    packing.add_argument("--node", default="22", metavar="VERSION", help="Node.js for npm packages (default: 22)")
    packing.add_argument(
        "--python", default="3.12", metavar="3.N", help="Python for pip packages, or its path (default: 3.12)"
    )


def _list(arguments: argparse.Namespace) -> None:
    store = AgentStore()
    packages = [*PACKAGES.values(), *(user_package(one.build.name) for one in store.packed())]
    if arguments.json:
        sys.stdout.write(f"{json.dumps([_as_json(package, store) for package in packages], indent=2)}\n")
        return
    rows = [_row(package, store) for package in packages]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    print_table(make_console(), columns, texts=_TEXTS, leave_out=("wires", "needs", "licence", "fetched"))


def _row(package: AgentPackage, store: AgentStore) -> dict[str, str]:
    builds = package.for_machine()
    found = [one for build in builds if (one := store.find(build)) is not None]
    there = ", ".join(one.build.variant for one in found)
    used = max((one.last_used for one in found), default=None)
    return {
        "agent": package.name,
        "version": package.version or found[0].version,
        "fetched": format_size(builds[0].size) if builds and builds[0].size else "-",
        "installed": f"{there} ({format_size(sum(one.size for one in found))})" if found else "no",
        "last use": time.strftime("%Y-%m-%d", time.localtime(used)) if used is not None else "-",
        "licence": package.licence or "-",
        "wires": ", ".join(package.wires) or "-",
        "needs": " or ".join(package.floors.values()) or "nothing",
    }


def _as_json(package: AgentPackage, store: AgentStore) -> dict[str, Any]:
    return {
        "name": package.name,
        "title": package.title,
        "version": package.version or None,
        "licence": package.licence or None,
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
        "last_used": found.last_used if found is not None else None,
        "packages": found.packages if found is not None else None,
        "programs": found.programs if found is not None else None,
    }


def _install(arguments: argparse.Namespace) -> None:
    store = AgentStore()
    packages = [one for one in _chosen(arguments) if not (arguments.all and one.is_packed)]
    builds = [
        build
        for package in packages
        for build in default_builds(package, libc=arguments.libc, pythons=arguments.python)
    ]
    for build in builds:
        if store.place(build).exists() and store.find(build, thoroughly=True) is None:
            print_progress(f"{store.place(build)} was changed after its installation, so it is fetched again.")
            store.remove(build)
        found = install(build, say=print_progress, store=store)
        sys.stdout.write(f"{build.name} {build.version}  {found.path}  {format_size(found.size)}\n")
        sys.stdout.flush()


def _pack(arguments: argparse.Namespace) -> None:
    specs = (arguments.spec, *arguments.add)
    for spec in specs:
        parse_spec(spec)
    name = arguments.name or default_name(arguments.spec)
    if re.fullmatch(PACKAGE_NAME, name) is None:
        raise ConfigError(
            f"Expected a package name of lower-case letters, digits, `-` and `_`, got {name!r}. Use `--name NAME`."
        )
    (build,) = user_package(name, Pack(specs, node=arguments.node, python=arguments.python)).builds
    found = install(build, say=print_progress, replace=True)
    sys.stdout.write(
        f"{name} {found.version}  {found.path}  {format_size(found.size)}\n"
        f"programs: {', '.join(found.programs)}\n"
        f"To use it: `ares-exp agent=command agent.package={name} agent.command=…`\n"
    )


def _remove(arguments: argparse.Namespace) -> None:
    store = AgentStore()
    builds = [
        build
        for package in _chosen(arguments, [user_package(one.build.name) for one in store.packed()])
        for build in package.builds
        if arguments.libc in (None, build.libc) and (not arguments.python or build.python in arguments.python)
    ]
    removed = [build for build in builds if store.remove(build)]
    for build in removed:
        sys.stdout.write(f"removed {store.place(build)}\n")
    if not removed:
        sys.stdout.write("None of these packages is installed.\n")


def _chosen(arguments: argparse.Namespace, packed: Sequence[AgentPackage] = ()) -> list[AgentPackage]:
    """Returns the packages that the arguments select. `packed` contains the packages that the user has packed."""
    if arguments.all:
        return [*PACKAGES.values(), *packed]
    if not arguments.agents:
        raise ConfigError(f"Name at least one agent, or use `--all`. The agents are {', '.join(PACKAGES)}.")
    users = {one.name: one for one in packed}
    known = [*PACKAGES, *(name for name in users if name not in PACKAGES)]
    for name in arguments.agents:
        if name not in known:
            raise ConfigError(
                f"Expected an agent that can be installed, one of {', '.join(known)}, got {name!r}."
                f"{close_matches(name, known)}"
            )
    return [found for name in arguments.agents for found in (users.get(name), PACKAGES.get(name)) if found]
