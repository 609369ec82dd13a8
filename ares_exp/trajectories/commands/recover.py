"""The command `recover`: episodes of dead processes, and the good parts of broken files."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

from ares_exp.errors import TrajectoryFormatError, UserError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.terminal.terminal import count_of
from ares_exp.trajectories.episode_places import (
    find_files,
    finished_path,
    is_newer,
    is_partial,
    recovered_path,
)
from ares_exp.trajectories.files.episode_file import load_header, salvage_episode
from ares_exp.trajectories.files.formats import format_of
from ares_exp.trajectories.files.jsonl_file import read_jsonl
from ares_exp.trajectories.files.writer_lock import has_writer
from ares_exp.trajectories.records import EpisodeTrajectory

EXIT_OK, EXIT_FAILED = 0, 1

DESCRIPTION = """\
Partial files whose process has died become finished files, with the outcome lost. Of a finished file that is broken or
cut short the good part goes to a file beside it, ID.recovered.json (trajectories.recovered.jsonl, …), and the file
itself stays as it is. What a living process writes is left alone.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first
  %(prog)s outputs --dry-run

Exit codes: 0 everything is whole or recovered; 1 something could not be recovered; 2 the command line is wrong.
"""
BROKEN = ".broken"
"""Goes to the name of a partial file that had more than could be read."""


class RecoveryAction(StrEnum):
    """What was done with a file."""

    RECOVERED = "recovered"
    REMOVED = "removed"
    LEFT_ALONE = "left alone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What became of a file that was not whole.

    Attributes:
        path: The file.
        action: What was done with it.
        says: What was kept and what is lost, or why nothing was done.
    """

    path: Path
    action: RecoveryAction
    says: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "paths", nargs="+", type=run_path, metavar="PATH", help=f"run directories, folders or files; {MEANING}"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    files = [file for path in arguments.paths for group in find_files(path) for file in group]
    for file in files:  # a mistake in the last path is an error before anything else
        format_of(file)
    actions: Counter[RecoveryAction] = Counter()
    for recovery in recover(files, dry_run=arguments.dry_run):
        actions[recovery.action] += 1
        sys.stdout.write(f"{recovery.action:<10}  {recovery.path}: {recovery.says}\n")
    counts = ", ".join(f"{count} {action}" for action, count in actions.items())
    whole = f"{len(files) - actions.total()} of {len(files)} files are whole"
    undone = " Nothing was done (--dry-run)." if arguments.dry_run and actions else ""
    sys.stdout.write(f"{counts and f'{counts}; '}{whole}.{undone}\n")
    return EXIT_FAILED if actions[RecoveryAction.FAILED] else EXIT_OK


def recover(files: list[Path], *, dry_run: bool = False) -> Iterator[Recovery]:
    """Recovers what is not whole of `files`, and tells of each that is not.

    The files must have been listed before this is called: a process that begins to write in the meantime holds its lock
    before its files appear.
    """
    for path in files:
        try:
            recover_file = _recover_partial if is_partial(path) else _recover_finished
            recovery = recover_file(path, dry_run=dry_run)
        except OSError as error:
            recovery = Recovery(
                path, RecoveryAction.FAILED, _in_short(path, f"{error.filename or path}: {error.strerror}.")
            )
        except (TrajectoryFormatError, UserError) as error:
            recovery = Recovery(path, RecoveryAction.FAILED, _in_short(path, str(error)))
        if recovery is not None:
            yield recovery


def _recover_partial(path: Path, *, dry_run: bool) -> Recovery | None:
    if has_writer(path.parent):
        return Recovery(path, RecoveryAction.LEFT_ALONE, "a living process writes in its folder.")
    if not path.exists():
        return None  # the episode ended after the files were listed
    if path.stat().st_size == 0:
        return _remove(path, "its process died before it wrote anything.", dry_run=dry_run)
    episode, problem = salvage_episode(path)
    target = finished_path(path)
    if target.exists():
        if _is_whole(target):
            return _remove(path, f"{target.name} is there, and whole.", dry_run=dry_run)
        target = recovered_path(target)
        if target.exists():
            return Recovery(path, RecoveryAction.FAILED, f"{target} is there already: move it away, and recover again.")
    unread = 0 if problem is None else _count_lines(path) - 1 - episode.num_steps
    if not dry_run:
        format_of(target).write(target, [episode])
        if unread > 1:
            path.rename(path.with_name(f"{path.name}{BROKEN}"))
        else:
            path.unlink()
    lost = " Lost: the last line, which was cut short." if unread == 1 else ""
    if unread > 1:
        lost = f" Lost: {unread} lines, from the first broken one on; they are kept in {path.name}{BROKEN}."
    return Recovery(path, RecoveryAction.RECOVERED, f"{_Kept.of([episode])} kept in {target.name}.{lost}")


def _recover_finished(path: Path, *, dry_run: bool) -> Recovery | None:
    problems: list[str] = []
    was_written = has_writer(path)  # it may end before all is read: what was read then is not what there is
    kept = _Kept.of(_good_part(path, problems))
    if not problems:
        return None
    if was_written or has_writer(path):
        return Recovery(path, RecoveryAction.LEFT_ALONE, "a living process writes in it.")
    what = " ".join(_in_short(path, problem) for problem in problems)
    target = recovered_path(path)
    if not kept.episodes:
        return Recovery(path, RecoveryAction.FAILED, f"nothing of it can be read: {what}")
    if target.exists():
        if is_newer(target, path):
            return Recovery(path, RecoveryAction.LEFT_ALONE, f"{target.name} has its good part already.")
        return Recovery(
            path, RecoveryAction.FAILED, f"{target} is there already: move it away, and recover again. {what}"
        )
    if not dry_run:
        format_of(target).write(target, _good_part(path, []))
    return Recovery(path, RecoveryAction.RECOVERED, f"{kept}{_planned(path)} kept in {target.name}. Found: {what}")


def _in_short(path: Path, problem: str) -> str:
    """Returns a problem without the path and without the advice to recover."""
    return problem.removeprefix(str(path)).lstrip(": ").partition(" `ares-exp ")[0]


def _remove(path: Path, why: str, *, dry_run: bool) -> Recovery:
    if not dry_run:
        path.unlink()
    return Recovery(path, RecoveryAction.REMOVED, why)


def _good_part(path: Path, problems: list[str]) -> Iterator[EpisodeTrajectory]:
    """Yields the readable episodes of a finished file, one after the other."""
    if format_of(path).name == "jsonl":
        yield from read_jsonl(path, problems=problems)
    else:
        episodes, found = format_of(path).salvage(path)
        problems += found
        yield from episodes


def _is_whole(path: Path) -> bool:
    try:
        return sum(1 for _ in format_of(path).read(path)) > 0
    except TrajectoryFormatError:
        return False


def _planned(path: Path) -> str:
    """Returns how many steps a broken file should have, if its end says so."""
    with suppress(TrajectoryFormatError):
        if format_of(path).name == "json" and (header := load_header(path)) is not None:
            return f" of {header.num_steps}"
    return ""


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


@dataclass(slots=True)
class _Kept:
    """What was kept, in numbers and words."""

    episodes: int = 0
    steps: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, episodes: Iterable[EpisodeTrajectory]) -> Self:
        kept = cls()
        for episode in episodes:
            kept.episodes += 1
            kept.steps += episode.num_steps
            kept.outcomes[episode.outcome] += 1
        return kept

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items())
        what = f"outcome {next(iter(self.outcomes))}" if self.episodes == 1 else f"{self.episodes} episodes: {outcomes}"
        return f"{count_of(self.steps, 'time step')} ({what})"
