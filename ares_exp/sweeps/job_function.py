"""What Hydra calls for each job of a command: for the only one, or for each of a sweep, in whatever process."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp import exit_codes

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ares_exp.results import RunSummary

logger = logging.getLogger(__name__)


class JobFunction:
    """Runs a job and returns its objective, which is what a sweeper looks for the most of.

    A job that is refused or fails returns `None`, so that the others go on; it leaves a note in its folder, because
    what this object knows in another process is lost with that. Pickled by launchers, it arrives ready for its work.

    Attributes:
        exit_code: That of the worst job in this process.
    """

    __name__ = "job"  # Hydra wraps it like a function

    def __init__(self, first_process: Mapping[str, str] | None = None) -> None:
        """Runs nothing yet.

        Args:
            first_process: What `owner_labels` says in the process of the command; `None` in that process.
        """
        self.exit_code = exit_codes.COMPLETE
        self._first_process = first_process

    def __reduce__(self) -> tuple[Any, ...]:
        from ares_exp.containers.ownership import owner_labels

        return _arrive, (sys.argv[1:], self._first_process or owner_labels())

    def __call__(self, config: DictConfig) -> float | None:
        """Runs a job; one that was complete before is not played again.

        Raises:
            KeyboardInterrupt: It was interrupted, and with it the command.
            SweepInterrupted: Likewise, in a process of its own.
        """
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        from ares_exp.errors import UserError
        from ares_exp.job import run_job
        from ares_exp.sweeps.failure_note import FailureNote
        from ares_exp.sweeps.interruption import SweepInterrupted, ends_with_the_sweep
        from ares_exp.sweeps.objective import check_objective, objective

        hydra = HydraConfig.get()
        note = FailureNote(Path(hydra.runtime.output_dir)) if hydra.mode == RunMode.MULTIRUN else None
        here = self._first_process is None
        watch = nullcontext() if here else ends_with_the_sweep(Path(hydra.sweep.dir), self._first_process or {})
        try:
            with watch:
                check_objective(config.objective, attempts=config.attempts)
                summary = (_done_before(hydra, config) if note is not None and config.resume else None) or run_job(
                    config
                )
        except UserError as error:
            self._fail(note, exit_codes.USAGE, str(error))
            print_error(str(error))
            return None
        except SweepInterrupted:
            raise
        except Exception as error:
            logger.exception("This is a bug in ares_exp or in a component of your own")
            self._fail(note, exit_codes.INCOMPLETE, f"{type(error).__name__}: {error}")
            return None
        if note is not None:
            note.remove()
        if summary.interrupted:
            raise KeyboardInterrupt if here else SweepInterrupted
        if not summary.complete:
            self.exit_code = max(self.exit_code, exit_codes.INCOMPLETE)
        return objective(summary, config.objective)

    def _fail(self, note: Any, exit_code: int, message: str) -> None:
        self.exit_code = max(self.exit_code, exit_code)
        if note is not None:
            note.write(exit_code, message)


def _done_before(hydra: Any, config: DictConfig) -> RunSummary | None:
    """What a job of a resumed sweep adds up to, if it was complete before: it is not played again."""
    from omegaconf import OmegaConf

    from ares_exp.sweeps.job_folder import JobFolder

    job = JobFolder.read(Path(hydra.runtime.output_dir))
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    if not job.is_done(values):
        return None
    sys.stdout.write(f"\n#{hydra.job.num}: complete before\n")
    return job.summary


def _arrive(arguments: Sequence[str], first_process: Mapping[str, str]) -> JobFunction:
    """The job function in a process that a launcher started: makes that process what the first one is."""
    from ares_exp.containers.ownership import owner_labels
    from ares_exp.hydra_resolvers import register_resolvers

    if owner_labels() == first_process:
        return JobFunction()
    register_resolvers()
    sys.argv[1:] = arguments  # for the records, and because secrets that were typed are masked
    os.environ["TERM"] = "dumb"  # several processes on one terminal cannot each redraw a line of it
    with suppress(OSError):  # it may lead a session already
        os.setsid()
    return JobFunction(first_process)


def print_error(message: str) -> None:
    """Prints one paragraph to stderr."""
    width = 100 if sys.stderr.isatty() else 10_000
    paragraph = "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in message.splitlines())
    sys.stderr.write(f"error: {paragraph}\n")
