"""The function that Hydra calls for a run, or for each job of a sweep. Launchers may call it in other processes."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ares_exp.config.hydra_setup import register_resolvers
from ares_exp.containers.ownership import owner_labels
from ares_exp.errors import SweepInterrupted, UserError
from ares_exp.records import exit_codes
from ares_exp.records.results import RunSummary
from ares_exp.records.run_dir import RunDir
from ares_exp.records.terminal_text import print_error
from ares_exp.runs.sweeps.interruption import JobProcess
from ares_exp.runs.sweeps.jobs import BASIC_SWEEPER, FailureNote, JobFolder
from ares_exp.trackers.metrics import DEFAULT, check_objective, objective

logger = logging.getLogger(__name__)


class JobFunction:
    """Runs a job and returns its objective: the value that an optimizing sweeper maximizes, such as the mean reward.

    If a job is rejected or fails, the function returns `None`, so that the other jobs continue. The failure is recorded
    in the job's folder, because `exit_code` is lost when a job process ends. Launchers can pickle the object.

    Attributes:
        exit_code: Highest exit code of the jobs in this process.
    """

    __name__ = "job"  # Hydra wraps it like a function

    def __init__(self, process: JobProcess | None = None) -> None:
        """Creates the function. `process` is the launcher's process for jobs; `None` in the process of the command."""
        self.exit_code = exit_codes.COMPLETE
        self._process = process

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (tuple(sys.argv[1:]), tuple(owner_labels().items()))

    def __call__(self, config: DictConfig) -> float | None:
        """Runs a job, unless it is complete already.

        Raises:
            KeyboardInterrupt: The job was interrupted in the process of the command.
            SweepInterrupted: The job was interrupted in a job process, and the sweeper must not start more jobs.
        """
        from ares_exp.runs.run import Run, prepare_log, run_attended
        from ares_exp.runs.steady_loop import run_steadily

        hydra = HydraConfig.get()
        run_dir = RunDir(Path(hydra.runtime.output_dir))
        prepare_log()
        note = FailureNote(run_dir.path) if hydra.mode == RunMode.MULTIRUN else None
        try:
            with self._process.running(Path(hydra.sweep.dir)) if self._process is not None else nullcontext():
                with suppress(OmegaConfBaseException):  # the run reports errors in its config
                    if config.objective != DEFAULT:
                        check_objective(config.objective, attempts=config.attempts)
                summary = _complete_before(config, hydra) if note is not None and config.resume else None
                if summary is None:
                    summary = run_steadily(run_attended(Run(config, hydra)))
        except UserError as error:
            ran = run_dir.has_run  # such a run keeps its records
            if note is None:  # Hydra continues to write to the folders of a sweep
                run_dir.discard()
            self._fail(None if ran else note, exit_codes.USAGE, str(error))
            if note is None:
                print_error(str(error))
            elif ran:  # the sweep's summary reports the other errors
                print_error(f"job {hydra.job.num}: {error}")
            return None
        except SweepInterrupted:
            self._end_command(hydra)
            return None
        except Exception as error:
            logger.exception("This is a bug in ares_exp or in one of your custom components")
            self._fail(note, exit_codes.INCOMPLETE, f"{type(error).__name__}: {error}")
            return None
        if note is not None:
            note.remove()
        if summary.interrupted:
            self._end_command(hydra)
            return None
        self.exit_code = max(self.exit_code, summary.exit_code)
        return None if note is None else objective(summary, config.objective)

    def _end_command(self, hydra: Any) -> None:
        """Ends the command after an interruption, by raising `KeyboardInterrupt`.

        In a launcher's process, ends only this job. Raises `SweepInterrupted` unless the sweeper is Hydra's basic
        sweeper, because other sweepers would start more jobs.
        """
        if self._process is None:
            raise KeyboardInterrupt
        if not hydra.sweeper._target_.endswith(BASIC_SWEEPER):  # other sweepers would start more jobs
            raise SweepInterrupted

    def _fail(self, note: FailureNote | None, exit_code: int, message: str) -> None:
        self.exit_code = max(self.exit_code, exit_code)
        if note is not None:
            note.write(exit_code, message)


def _complete_before(config: DictConfig, hydra: Any) -> RunSummary | None:
    """Returns the summary of a job if an earlier session of the sweep has completed it; otherwise `None`."""
    with suppress(OmegaConfBaseException):
        values: Any = OmegaConf.to_container(config, resolve=True)
        job = JobFolder.read(Path(hydra.runtime.output_dir))
        if job.is_done(values):
            sys.stdout.write(f"#{hydra.job.num}: complete before\n")
            return job.summary
    return None


def _arrive(arguments: Sequence[str], first_process: tuple[tuple[str, str], ...]) -> JobFunction:
    """Unpickles a `JobFunction`. In a process that a launcher has started, first registers the config's resolvers."""
    if owner_labels() == dict(first_process):
        return JobFunction()
    return JobFunction(_job_process(tuple(arguments), first_process))


@functools.cache  # a process unpickles a job function for each job
def _job_process(arguments: tuple[str, ...], first_process: tuple[tuple[str, str], ...]) -> JobProcess:
    register_resolvers()
    sys.argv[1:] = arguments  # for the records and the masking of typed secrets
    os.environ["TERM"] = "dumb"  # several processes cannot redraw lines of one terminal
    with suppress(OSError):  # the process may already lead a session
        os.setsid()
    return JobProcess(dict(first_process))
