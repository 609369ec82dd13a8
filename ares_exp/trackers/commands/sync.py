"""Uploads the W&B runs of run directories."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ares_exp.command_line.terminal import printable
from ares_exp.errors import UserError
from ares_exp.trackers.wandb_recording.record_file import record_files
from ares_exp.trackers.wandb_recording.relocation import relocate
from ares_exp.trackers.wandb_recording.service import no_traces

EXIT_OK, EXIT_NOT_ALL = 0, 1
NAMED = 5
"""So many of the files that are left out are named."""
SYNCED = ".synced"
"""What W&B appends to the name of a record file for its mark that it was uploaded."""

DESCRIPTION = """\
Uploads the W&B runs that were recorded in run directories, by `wandb sync`. A run directory that was moved, or copied
to another machine, is first made right: W&B notes the files of artifacts by absolute paths, and says nothing of those
that it does not find. The sessions of a resumed run become one W&B run.
"""
EPILOG = """\
Examples:
  python -m ares_exp.trackers sync outputs/first
  python -m ares_exp.trackers sync outputs/sweep         all runs of a sweep
  python -m ares_exp.trackers sync outputs/first --again

Exit codes: 0 all is uploaded; 1 something could not be; 2 the command line or a run directory is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="run directories, or folders of them")
    parser.add_argument("--again", action="store_true", help="upload what was uploaded before, too")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    run_dirs = [found for path in arguments.paths for found in _run_dirs(path)]
    sessions, whole = [], True
    for run_dir in run_dirs:
        for session in record_files(run_dir):
            if arguments.again or not _mark(session).exists():
                whole &= _make_right(session, run_dir)
                sessions.append(session)
    if not sessions:
        sys.stdout.write("Nothing to upload: every session was uploaded before (--again uploads it once more).\n")
        return EXIT_OK
    for session in sessions:
        _mark(session).unlink(missing_ok=True)
    sys.stdout.flush()
    # Its output is for the user; each session by itself, in their order.
    with no_traces() as environment:
        command = [sys.executable, "-m", "wandb", "sync", *map(os.fspath, sessions)]
        done = subprocess.run(command, env=environment, check=False)
    failed = [session for session in sessions if not _mark(session).exists()]
    for session in failed:
        sys.stderr.write(f"not uploaded: {printable(str(session))}\n")
    return EXIT_OK if whole and not failed and done.returncode == 0 else EXIT_NOT_ALL


def _run_dirs(path: Path) -> list[Path]:
    if record_files(path):
        return [path]
    found = [folder for folder in sorted(path.glob("*")) if record_files(folder)] if path.is_dir() else []
    if not found:
        raise UserError(
            f"Expected {path} to be a run directory with a W&B run (`wandb/`), or a folder of those, found none. "
            "Runs have one when they are played with `tracker=wandb`."
        )
    return found


def _make_right(session: Path, run_dir: Path) -> bool:
    """Has the session name its files by where they are; says whether all are there."""
    try:
        relocation = relocate(session, run_dir)
    except ValueError as error:
        raise UserError(f"{error}. It cannot be uploaded.") from None
    if relocation.moved:
        sys.stdout.write(f"{printable(str(run_dir))} was moved: {relocation.moved} paths made right\n")
    for name, paths in relocation.missing.items():
        more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
        sys.stderr.write(
            f"{printable(str(run_dir))}: {len(paths)} files of the artifact {printable(name)} are left out, as they "
            "are missing, have changed, or lie outside of the run directory with another content than was recorded: "
            f"{printable(', '.join(paths[:NAMED]))}{more}; "
            "unless W&B has that version already, it will not be uploaded\n"
        )
    return not relocation.missing


def _mark(session: Path) -> Path:
    return session.with_name(session.name + SYNCED)
