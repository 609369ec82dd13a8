"""The builds that a command line of `agents` names."""

from __future__ import annotations

import argparse

from ares_exp.agents.toolbox.package import AgentPackage
from ares_exp.agents.toolbox.pinned import PACKAGES, PYTHONS, package_named
from ares_exp.errors import ConfigError


def add_choice(parser: argparse.ArgumentParser, *, verb: str) -> None:
    """Declares the arguments that choose builds."""
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=f"what to {verb}: {', '.join(PACKAGES)}")
    parser.add_argument("--all", action="store_true", help="every agent")
    parser.add_argument("--libc", choices=("glibc", "musl"), help="the build for that C library alone")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        choices=PYTHONS,
        metavar="3.N",
        help="of agents written in Python: the build for that minor version; may be given again",
    )


def chosen_packages(arguments: argparse.Namespace) -> list[AgentPackage]:
    """Returns the packages that are named.

    Raises:
        ConfigError: None is, or one that is not there.
    """
    if arguments.all:
        return list(PACKAGES.values())
    if not arguments.agents:
        raise ConfigError(f"Expected the name of an agent, one of {', '.join(PACKAGES)}, or `--all`.")
    return [package_named(name) for name in arguments.agents]
