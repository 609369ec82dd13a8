"""The command that removes what dead runs of this machine left, on it and at services."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence

from ares_exp.containers.daytona.credentials import has_credentials
from ares_exp.containers.daytona.leftovers import find_all as find_sandboxes
from ares_exp.containers.docker.engine import connect, engine_errors, reason
from ares_exp.containers.docker.leftovers import find as find_on_engine
from ares_exp.containers.docker.leftovers import find_locks
from ares_exp.containers.leftover import Leftover
from ares_exp.containers.owned_directory import find_short_lived
from ares_exp.errors import ContainerServiceError, PreflightError

EXIT_OK, EXIT_REMAINS, EXIT_INTERRUPTED = 0, 1, 130

_DESCRIPTION = """\
Removes what dead runs of this machine left: containers, networks, volumes and images on the Docker engine, the
directories and cgroups of local boxes, temporary directories of builds and verifiers, and, where DAYTONA_API_KEY is
set, sandboxes of the Daytona service. What belongs to a run that lives, to another machine or to another user is not
touched. Every run does the same when it starts; this is for when no run is to follow.
"""
_EXIT_CODES = (
    "Exit codes: 0 nothing of dead runs is left (without a Docker engine: outside of one); 1 something could not be "
    "removed, or a service not be asked; 2 the command line is wrong."
)
_UNITS = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))


def main(arguments: Sequence[str]) -> int:
    """Runs `python -m ares_exp.containers` with these arguments and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _clean(dry_run=options.dry_run, images=options.images, snapshots=options.snapshots)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ares_exp.containers", description="Looks after the containers of runs.")
    commands = parser.add_subparsers(required=True, metavar="command")
    clean = commands.add_parser(
        "clean", help="remove what dead runs of this machine left", description=_DESCRIPTION, epilog=_EXIT_CODES
    )
    clean.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    clean.add_argument(
        "--images",
        action="store_true",
        help="also the images built from tasks' Dockerfiles, which are kept for the next run; not those in use",
    )
    clean.add_argument(
        "--snapshots",
        action="store_true",
        help="also the snapshots that the Daytona service keeps of sandboxes for runs of this machine "
        "(container.capture=provider), of runs that live, too: what is recorded of them cannot be restored after that",
    )
    return parser


def _clean(*, dry_run: bool, images: bool, snapshots: bool) -> int:
    found, failed = _found(images=images, snapshots=snapshots)
    stale = [leftover for leftover in found if leftover.is_stale]
    remaining = 0
    for leftover in stale:
        problem = "" if dry_run else leftover.remove()
        remaining += bool(problem)
        _say(f"{leftover.kind:<13}  {leftover.name}  of {leftover.whose}{_age(leftover)}{problem and f': {problem}'}")
    for whose, count in Counter(leftover.whose for leftover in found if not leftover.is_stale).items():
        _say(f"left alone: {count} of {whose}, which lives, or cannot be known from here to be dead")
    _say(_total(len(stale), remaining, dry_run=dry_run))
    return EXIT_REMAINS if remaining or failed else EXIT_OK


def _found(*, images: bool, snapshots: bool) -> tuple[list[Leftover], bool]:
    """All that runs made here, and whether an engine or a service that is there would not say what it has."""
    found = [*find_locks(), *find_short_lived()]
    failed = False
    if sys.platform == "linux":
        from ares_exp.containers.local.leftovers import find as find_boxes

        found += find_boxes()
    try:
        engine = asyncio.run(connect())
        found += find_on_engine(engine.api, cached_images=images)
    except PreflightError as error:
        _say(f"Docker was left out. {error}")
    except engine_errors() as error:
        _say(f"The Docker engine could not be asked what it has: {reason(error)}.")
        failed = True
    if has_credentials():
        try:
            found += find_sandboxes(snapshots=snapshots)
        except (PreflightError, ContainerServiceError) as error:
            _say(f"The Daytona service could not be asked what it has. {error}")
            failed = True
    return found, failed


def _age(leftover: Leftover) -> str:
    if leftover.created is None:
        return ""
    seconds = max(time.time() - leftover.created, 0)
    size, unit = next((one for one in _UNITS if seconds >= 2 * one[0]), _UNITS[-1])
    return f", made {seconds // size:.0f} {unit} ago"


def _total(count: int, remaining: int, *, dry_run: bool) -> str:
    if not count:
        return "Nothing of dead runs is left."
    things = "1 thing" if count == 1 else f"{count} things"
    if dry_run:
        return f"{things} would be removed."
    return f"{count - remaining} of {things} removed." if remaining else f"{things} removed."


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
