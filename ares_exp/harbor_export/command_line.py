"""The command line of `python -m ares_exp.export_job`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.run_dir import SWEEP_RECORD
from ares_exp.terminal.run_command import EXIT_OK, run_module
from ares_exp.terminal.terminal import count_of, printable

PROGRAM = "python -m ares_exp.export_job"
DESCRIPTION = """\
Writes a run as a Harbor job: a folder with a config.json and a result.json, and one folder for each
attempt with its trajectory (ATIF), what its verifier left and its artifacts. Harbor's viewer and scripts open it as
they open their own. Of an attempt with retries the last one is written. The run stays as it is.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/default/2026-01-31_12-00-00            writes jobs/2026-01-31_12-00-00
  %(prog)s outputs/first -o exported --name first-model
  harbor view exported
"""


def main(argv: Sequence[str], program: str = PROGRAM) -> int:
    """Runs a command line and returns its exit code."""
    return run_module(__name__, argv, program)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("run", type=run_path, metavar="RUN", help=f"the run directory; {MEANING}")
    parser.add_argument(
        "-o", "--jobs-dir", type=Path, default=Path("jobs"), metavar="OUT", help="the folder of jobs (jobs)"
    )
    parser.add_argument("--name", help="what to call the job there (as the run directory is called)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return _export(arguments.run, arguments.jobs_dir, arguments.name)


def _export(run: Path, jobs_dir: Path, name: str | None) -> int:
    from ares_exp.harbor_export.job_folder import is_file_name, write_job
    from ares_exp.harbor_export.recorded_job import read_job

    job = read_job(run)
    name = _name_of(run.resolve()) if name is None else name
    if not is_file_name(name):
        raise ConfigError(f"Expected the name of a job to be letters, digits and ._-, got {name!r:.80}: `--name …`.")
    exported = write_job(job, jobs_dir, name)
    for warning in exported.warnings:
        sys.stderr.write(f"warning: {printable(warning)}\n")
    stats = exported.result["stats"]
    unfinished = job.planned - stats["n_completed_trials"]
    sys.stdout.write(
        f"{count_of(stats['n_completed_trials'], 'trial')}, {stats['n_errored_trials']} of them with an error"
        f"{f'; {unfinished} without a result yet' if unfinished else ''}\n"
        f"Written to {jobs_dir / name}; Harbor shows it: harbor view {jobs_dir}\n"
    )
    return EXIT_OK


def _name_of(run: Path) -> str:
    """The name of its directory; the directories of a sweep's jobs are only numbered."""
    return f"{run.parent.name}_{run.name}" if (run.parent / SWEEP_RECORD).is_file() else run.name
