"""Runs and sweeps through Hydra: the call of Hydra, and the job function and the callback that Hydra calls."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ares_exp.config.explain import explain, is_below_a_list
from ares_exp.config.hydra_setup import (
    NOTHING_TO_RESUME,
    OptionSearchPath,
    is_fresh_dir,
    register_resolvers,
    set_up_hydra,
    store_recorded_config,
    yaml_without_secrets,
)
from ares_exp.config.options import ROOT_CONFIG, conf_dir, config_dirs_of
from ares_exp.config.overrides import flags_and_overrides, quoted
from ares_exp.containers.ownership import owner_labels
from ares_exp.errors import ConfigError, SweepInterrupted, UserError
from ares_exp.records import exit_codes
from ares_exp.records.results import RunSummary
from ares_exp.records.run_dir import STOP, SWEEP_RECORD, RunDir, lock, write_atomically
from ares_exp.records.secrets import typed_secrets
from ares_exp.records.terminal_text import print_error
from ares_exp.runs.control.orders import Inbox
from ares_exp.runs.resume.compose_from_run import compose_from_run
from ares_exp.runs.sweeps.interruption import Interruption, JobProcess
from ares_exp.runs.sweeps.jobs import BASIC_SWEEPER, PLAN, FailureNote, JobFolder, SweepPlan, job_folders
from ares_exp.trackers.metrics import DEFAULT, check_objective, objective

logger = logging.getLogger(__name__)


def run_hydra() -> int:
    """Lets Hydra run the job of the arguments in `sys.argv`, or the jobs of a sweep. Returns the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors; it would print some and exit with 1
    set_up_hydra(config_dirs_of(sys.argv[1:]))
    source, root_config, job = None, ROOT_CONFIG, JobFunction()
    try:
        command = compose_from_run(*flags_and_overrides(sys.argv[1:]))
        source = command.source
        if command.values is not None:
            root_config = store_recorded_config(command.values, command.choices)
        flags, overrides = flags_and_overrides(command.argv)
        sys.argv[1:] = [*flags, *overrides]
        with unchecked_help():
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=root_config)(job)()
    except SweepRefused as refused:
        print_error(str(refused))
        return exit_codes.USAGE
    except (KeyboardInterrupt, SweepInterrupted):
        return exit_codes.INTERRUPTED
    except Exception as error:  # errors of jobs are not raised here
        return _explained(error, source, root_config)
    return job.exit_code


def _explained(error: Exception, source: Path | None, root_config: str) -> int:
    """Prints an error of the config, a launcher or a sweeper; returns the exit code. Raises unexpected errors again."""
    if SweepCallback.interruption is not None and SweepCallback.interruption.requested:
        return exit_codes.INTERRUPTED
    if isinstance(error, UserError):
        print_error(str(error))
    elif isinstance(error, HydraException | OmegaConfBaseException | YAMLError | OSError | ValueError) or (
        isinstance(error, TypeError) and is_below_a_list(error)
    ):
        taken = f" (The overrides recorded in {source} also apply.)" if source is not None else ""
        print_error(f"{explain(error, sys.argv[1:], root_config, OptionSearchPath.config_dirs)}{taken}")
    elif SweepCallback.sweep_dir is None:
        raise error
    else:
        print_error(f"Hydra's launcher or sweeper failed: {type(error).__name__}: {error}")
        return exit_codes.INCOMPLETE
    return exit_codes.USAGE


@contextmanager
def unchecked_help() -> Iterator[None]:
    """Makes argparse accept any object as a help text while the context is active.

    This works around an error of Hydra on Python 3.14. For `--shell-completion`, Hydra up to 1.3.8 passes a help object
    that is not a string, but Python 3.14 requires a string. Remove this function when the lower bound of `hydra-core`
    includes the fix.
    """
    if sys.version_info[:2] != (3, 14):
        yield
        return
    add_checked = argparse.ArgumentParser.add_argument

    def add_unchecked(parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
        text = options.pop("help", None)
        action = add_checked(parser, *names, **options)
        action.help = text
        return action

    argparse.ArgumentParser.add_argument = add_unchecked
    try:
        yield
    finally:
        del argparse.ArgumentParser.add_argument  # restores the inherited method


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


BASIC_LAUNCHER = "BasicLauncher"


class SweepRefused(BaseException):
    """A user error that prevents the sweep. It is a `BaseException`, because Hydra would only log an `Exception`."""


class SweepCallback(Callback):
    """Prepares the folder of a sweep, and passes its path to the processes of all jobs.

    Attributes:
        sweep_dir: Folder of the sweep that this process started; `None` before a sweep starts.
        interruption: Handler that ends the sweep early; `None` if the jobs run in this process.
        held: File descriptor that locks the folder until this process ends, so that no other sweep uses the folder.
    """

    sweep_dir: ClassVar[Path | None] = None
    interruption: ClassVar[Interruption | None] = None
    held: ClassVar[int | None] = None
    _record = ""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Creates and locks the folder of the sweep, and writes its records. Raises `SweepRefused` if this fails."""
        if config.resume and is_fresh_dir(config.hydra.sweep):
            raise SweepRefused(NOTHING_TO_RESUME.format(key="hydra.sweep.dir", what="sweep"))
        folder = Path(config.hydra.sweep.dir)
        # Another process may compose the config of a job from these overrides.
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.sweep.dir = str(folder).replace("${", "\\${")
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(str(folder))}")
        if "submitit" in config.hydra.launcher._target_ and typed_secrets(sys.argv[1:]):
            raise SweepRefused(
                "This launcher writes your command to disk, but the command contains a secret. Pass the secret in an "
                "environment variable (`policy.api_key_env=NAME`), or choose `hydra/launcher=joblib`."
            )
        try:
            self._start(config, folder)
        except ConfigError as error:
            raise SweepRefused(str(error)) from None
        except OSError as error:
            raise SweepRefused(
                f"Cannot write in the sweep's folder {folder}: {error.strerror}. Choose another folder with "
                "`hydra.sweep.dir=…`."
            ) from None
        SweepCallback.sweep_dir = folder
        if not config.hydra.launcher._target_.endswith(BASIC_LAUNCHER):
            SweepCallback.interruption = Interruption(folder)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Restores the sweep's `multirun.yaml`. The sweeper has overwritten it with a text that includes secrets."""
        if self._record:
            self._keep_record(Path(config.hydra.sweep.dir))

    def _start(self, config: DictConfig, folder: Path) -> None:
        record = folder / SWEEP_RECORD
        recorded = record.read_text(encoding="utf-8") if record.exists() else ""
        if recorded and not config.resume:
            raise ConfigError(
                f"The folder of this sweep, {folder}, already contains another sweep. Choose a new folder "
                "with `hydra.sweep.dir=…`, or continue that sweep with `resume=true`."
            )
        if not recorded and folder.is_dir() and (other := _run_in(folder)) is not None:
            raise ConfigError(
                f"Expected a new folder for this sweep, but {folder} contains another run, {other}. Choose another "
                "folder with `hydra.sweep.dir=…`."
            )
        plan = SweepPlan.of(config)
        plan.check_continues(SweepPlan.read(folder))
        folder.mkdir(parents=True, exist_ok=True)
        SweepCallback.held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        lock(SweepCallback.held, folder, what="sweep")
        plan.write(folder)
        self._record = recorded or yaml_without_secrets(config, typed_secrets(sys.argv[1:]))
        self._keep_record(folder)
        (folder / STOP).unlink(missing_ok=True)
        Inbox(RunDir(folder).control).forget()

    def _keep_record(self, folder: Path) -> None:
        """Writes the recorded content of `multirun.yaml` again if the file has changed."""
        path = folder / SWEEP_RECORD
        try:
            if not path.exists() or path.read_text(encoding="utf-8") != self._record:
                write_atomically(path, self._record)
        except OSError as error:
            logger.warning("Writing %s failed: %s", path, error)


def end_sweep(exit_code: int) -> int:
    """Prints the summary of the sweep that this process started, if any. Returns the exit code of the command."""
    folder, interruption = SweepCallback.sweep_dir, SweepCallback.interruption
    if folder is None:
        return exit_code
    from ares_exp.runs.sweeps.sweep_report import SweepReport, render_report

    if interruption is not None:
        interruption.end()
        exit_code = exit_codes.INTERRUPTED if interruption.requested else exit_code
    try:
        report = SweepReport.read(folder)
        if exit_code == exit_codes.USAGE and not report.has_started:
            _discard(folder)
            return exit_code
        report.write()
        with suppress(BrokenPipeError):  # the reader, such as `head`, closed the pipe
            render_report(report, sys.stdout)
    except (UserError, OSError) as error:
        logger.warning("Cannot create the summary of the sweep: %s", error)
        return max(exit_code, exit_codes.INCOMPLETE)
    worst = max(exit_code, report.exit_code)
    return exit_codes.INTERRUPTED if worst == exit_codes.INCOMPLETE and (folder / STOP).exists() else worst


def _run_in(folder: Path) -> Path | None:
    """Returns a run that already exists in a new sweep's folder, if any. The sweep would take it for its own job."""
    return folder if RunDir(folder).has_run else next(job_folders(folder), None)


def _discard(folder: Path) -> None:
    """Removes the records of a sweep that did not start because of a user error. Keeps all other files."""
    for name in (SWEEP_RECORD, PLAN):
        (folder / name).unlink(missing_ok=True)
    if folder.resolve() != Path.cwd() and not any(folder.iterdir()):
        folder.rmdir()
