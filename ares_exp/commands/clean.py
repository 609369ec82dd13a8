"""The command `clean`: removes containers and files that crashed runs have left behind."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ares_exp.commands.cli.run_command import print_line
from ares_exp.config.targets import import_target, option_targets
from ares_exp.containers.container import ContainerFactoryBase
from ares_exp.containers.ownership import Leftover, find_short_lived
from ares_exp.containers.user_cache import find_caches
from ares_exp.errors import ConfigError, ContainerServiceError, PreflightError
from ares_exp.records import exit_codes
from ares_exp.records.terminal_text import count_of, format_size

HELP = """\
Removes leftovers of killed runs from this machine: containers, networks, volumes and images on the Docker engine, the
directories and cgroups of local containers, and temporary directories of builds, verifiers and W&B uploads. If
DAYTONA_API_KEY is set, it also removes sandboxes of the Daytona service. It keeps everything that belongs to a run in
progress, to another machine or to another user. Every run does the same when it starts.
[arguments]
Examples:
  %(prog)s --dry-run            show what would be removed
  %(prog)s
  %(prog)s --cache --dry-run    show the cache for later runs, and its size

Exit codes: 0 no leftovers remain (an unavailable Docker engine is not checked); 1 something could not be
removed, or a service did not respond; 2 the command line is wrong.
"""
_UNITS = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed, without removing it")
    parser.add_argument(
        "--cache",
        action="store_true",
        help="also remove the cache for later runs (~/.cache/ares_exp, or below XDG_CACHE_HOME): downloaded tasks and "
        "repositories, and files made from them; implies --images and keeps entries that a running process uses",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="also remove unused images that were built from Dockerfiles of tasks and kept for later runs",
    )
    parser.add_argument(
        "--snapshots",
        action="store_true",
        help="also remove the sandbox snapshots that the Daytona service keeps for this machine's runs, including runs "
        "in progress; recorded snapshots that need them can then no longer be restored",
    )
    parser.add_argument(
        "--config-dir",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="also remove leftovers of custom backends whose options are defined in DIR/container; repeatable",
    )


def run(arguments: argparse.Namespace) -> int:
    found, failed = _found(
        arguments.config_dir, images=arguments.images or arguments.cache, snapshots=arguments.snapshots
    )
    if arguments.cache:
        found += find_caches()
    stale = [leftover for leftover in found if leftover.is_stale]
    remaining = 0
    for leftover in stale:
        problem = "" if arguments.dry_run else leftover.remove()
        remaining += bool(problem)
        size = "" if leftover.size is None else f", {format_size(leftover.size)}"
        about = f"{leftover.name}  of {leftover.whose}{_age(leftover)}{size}"
        print_line(f"{leftover.kind:<13}  {about}{problem and f': {problem}'}")
    for whose, count in Counter(leftover.whose for leftover in found if not leftover.is_stale).items():
        print_line(f"kept       {count_of(count, 'thing')} of {whose}: still in use, or cannot be checked from here")
    print_line(_total(stale, remaining, dry_run=arguments.dry_run))
    return exit_codes.INCOMPLETE if remaining or failed else exit_codes.COMPLETE


def _found(config_dirs: Sequence[Path], *, images: bool, snapshots: bool) -> tuple[list[Leftover], bool]:
    """Returns the leftovers of all container backends, and whether a container service reported an error.

    A backend that cannot be used on this machine is skipped with a message.
    """
    found, failed = [*find_short_lived()], False
    for name, target in option_targets("container", config_dirs).items():
        try:
            backend = import_target(target)
            if isinstance(backend, type) and issubclass(backend, ContainerFactoryBase):
                for leftover in backend.find_leftovers(images=images, snapshots=snapshots):
                    found.append(leftover)  # one by one, to keep the leftovers found before an error
        except (PreflightError, ConfigError) as error:
            print_line(f"{name.capitalize()} was not checked for leftovers. {error}")
        except ContainerServiceError as error:
            print_line(str(error))
            failed = True
    return found, failed


def _age(leftover: Leftover) -> str:
    if leftover.created is None:
        return ""
    seconds = max(time.time() - leftover.created, 0)
    size, unit = next((one for one in _UNITS if seconds >= 2 * one[0]), _UNITS[-1])
    return f", made {seconds // size:.0f} {unit} ago"


def _total(stale: Sequence[Leftover], remaining: int, *, dry_run: bool) -> str:
    count, size = len(stale), sum(leftover.size or 0 for leftover in stale)
    if not count:
        return "No leftovers found."
    things = count_of(count, "thing")
    if dry_run:
        return f"{things} would be removed{f', which frees up to {format_size(size)}' if size else ''}."
    return f"{count - remaining} of {things} removed." if remaining else f"{things} removed."
