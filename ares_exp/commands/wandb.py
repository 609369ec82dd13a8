"""Uploads the W&B runs of run directories."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ares_exp.errors import UserError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.recorded_results import read_results
from ares_exp.records.run_dir import RunDir
from ares_exp.terminal.terminal import printable
from ares_exp.trackers.wandb_recording.identity import WandbIdentity, read_identity
from ares_exp.trackers.wandb_recording.run_files import RunFiles
from ares_exp.trackers.wandb_recording.service import first_line, no_traces, uploading
from ares_exp.trackers.wandb_recording.upload_record import pages_of, read_upload_record

EXIT_OK, EXIT_NOT_ALL = 0, 1
SYNCED = ".synced"
"""W&B appends it to the name of a session's file for its mark that the session was uploaded."""

DESCRIPTION = """\
Uploads the W&B runs that were recorded in run directories: the numbers by `wandb sync`, then the table of episodes and
the artifacts from the files of the run directory, wherever it is now. The sessions of a resumed run become one W&B run.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/sweep         all runs of a sweep
  %(prog)s outputs/first --again

Exit codes: 0 all is uploaded; 1 something could not be; 2 the command line or a run directory is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "paths", nargs="+", type=run_path, metavar="PATH", help=f"run directories, or folders of them; {MEANING}"
    )
    parser.add_argument("--again", action="store_true", help="upload what was uploaded before, too")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    run_dirs = {found: _sessions(found) for path in arguments.paths for found in _run_dirs(path)}
    owed = {run_dir: _owed(run_dir, sessions, again=arguments.again) for run_dir, sessions in run_dirs.items()}
    whole = True
    with no_traces() as folder:
        missing = _sync([session for sessions in owed.values() for session in sessions], folder)
        for session in missing:
            sys.stderr.write(f"not uploaded: {printable(str(session))}\n")
        for run_dir, sessions in owed.items():
            identity = read_identity(run_dir)
            is_owed = identity is not None and (arguments.again or not identity.uploaded)
            if identity is not None and is_owed and missing.isdisjoint(sessions):
                whole &= _upload_files(run_dir, identity, folder)
            elif not sessions:
                sys.stdout.write(f"{printable(str(run_dir))}: nothing to upload (--again uploads it once more)\n")
    return EXIT_OK if whole and not missing else EXIT_NOT_ALL


def _run_dirs(path: Path) -> list[Path]:
    if _sessions(path):
        return [path]
    found = [folder for folder in sorted(path.glob("*")) if _sessions(folder)] if path.is_dir() else []
    if not found:
        raise UserError(
            f"Expected {path} to be a run directory with a W&B run (`wandb/`), or a folder of those, found none. "
            "Runs have one when they are played with `tracker=wandb`."
        )
    return found


def _sessions(run_dir: Path) -> list[Path]:
    """Returns the files of the sessions of a run, in their order."""
    return sorted(
        (path for path in (run_dir / "wandb").glob("*run-*/run-*.wandb") if not path.parent.is_symlink()),
        key=lambda path: path.parent.name.removeprefix("offline-"),
    )


def _owed(run_dir: Path, sessions: Sequence[Path], *, again: bool) -> list[Path]:
    """Returns the sessions that the service does not have."""
    identity = read_identity(run_dir)
    confirmed = () if identity is None else identity.confirmed
    return [one for one in sessions if again or not (_mark(one).exists() or one.parent.name in confirmed)]


def _sync(sessions: Sequence[Path], folder: Path) -> set[Path]:
    """Uploads sessions by `wandb sync`; returns those of which it does not say that they were uploaded.

    Args:
        sessions: Their files.
        folder: Where W&B's own logs are, which are removed at the end.
    """
    if sessions:
        for session in sessions:
            _mark(session).unlink(missing_ok=True)
        sys.stdout.flush()
        # Its output is for the user, but for the place of its log. It uploads the sessions of a W&B run in their order.
        command = [sys.executable, "-m", "wandb", "sync", "--include-online", *map(os.fspath, sessions)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if str(folder) not in line:
                    sys.stdout.write(line)
                    sys.stdout.flush()
    return {session for session in sessions if not _mark(session).exists()}


def _upload_files(run_dir: Path, identity: WandbIdentity, folder: Path) -> bool:
    """Uploads the table and the artifacts of a run; says whether they are whole."""
    record = read_upload_record(run_dir)
    if record is None:
        return True
    shown = printable(str(run_dir))
    episodes = RunDir(run_dir).episodes
    results = read_results(episodes).results if episodes.exists() else ()
    try:
        with uploading(identity, folder, exit_code=record.exit_code) as run:
            files = RunFiles(run, run_dir, pages_of(run_dir))
            changed = files.log_inputs(record)
            files.log_rows(results)
            files.table.flush()
            files.log_outputs(record)
            files.log_report(record)
            steps = run.step
    except Exception as error:  # whatever W&B raises
        sys.stderr.write(f"{shown}: the table and the artifacts were not uploaded: {printable(first_line(error))}\n")
        return False
    replace(identity, steps=max(steps, identity.steps), uploaded=True).write(run_dir)
    sys.stdout.write(f"{shown}: uploaded the table of {len(results)} episodes, and the artifacts\n")
    for parent in changed:
        sys.stderr.write(
            f"{shown}: the trajectories of {printable(str(parent))}, from which it was branched, are left out: they "
            "are not there any more, or have changed\n"
        )
    return not changed


def _mark(session: Path) -> Path:
    return session.with_name(session.name + SYNCED)
