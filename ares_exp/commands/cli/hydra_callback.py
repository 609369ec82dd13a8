"""The Hydra callback that prepares a sweep: it locks the sweep's folder, and writes the records of the sweep."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from ares_exp.config.hydra_setup import NOTHING_TO_RESUME, is_fresh_dir, yaml_without_secrets
from ares_exp.config.overrides import quoted
from ares_exp.errors import ConfigError, UserError
from ares_exp.records.exit_codes import INCOMPLETE, INTERRUPTED, USAGE
from ares_exp.records.run_dir import STOP, SWEEP_RECORD, RunDir, lock, write_atomically
from ares_exp.records.secrets import typed_secrets
from ares_exp.runs.control.orders import Inbox
from ares_exp.runs.sweeps.interruption import Interruption
from ares_exp.runs.sweeps.jobs import PLAN, SweepPlan, job_folders

logger = logging.getLogger(__name__)

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

    def __init__(self) -> None:
        self._record = ""

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
        exit_code = INTERRUPTED if interruption.requested else exit_code
    try:
        report = SweepReport.read(folder)
        if exit_code == USAGE and not report.has_started:
            _discard(folder)
            return exit_code
        report.write()
        with suppress(BrokenPipeError):  # the reader, such as `head`, closed the pipe
            render_report(report, sys.stdout)
    except (UserError, OSError) as error:
        logger.warning("Cannot create the summary of the sweep: %s", error)
        return max(exit_code, INCOMPLETE)
    worst = max(exit_code, report.exit_code)
    return INTERRUPTED if worst == INCOMPLETE and (folder / STOP).exists() else worst


def _run_in(folder: Path) -> Path | None:
    """Returns a run that already exists in a new sweep's folder, if any. The sweep would take it for its own job."""
    return folder if RunDir(folder).has_run else next(job_folders(folder), None)


def _discard(folder: Path) -> None:
    """Removes the records of a sweep that did not start because of a user error. Keeps all other files."""
    for name in (SWEEP_RECORD, PLAN):
        (folder / name).unlink(missing_ok=True)
    if folder.resolve() != Path.cwd() and not any(folder.iterdir()):
        folder.rmdir()
