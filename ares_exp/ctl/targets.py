"""Targets of orders: a run, or the jobs of a sweep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ares_exp.control.orders import look
from ares_exp.control.status import RunStatus, read_status
from ares_exp.errors import ConfigError
from ares_exp.pages.run_payload import ShownRun
from ares_exp.records.run_dir import SWEEP_RECORD, RunDir
from ares_exp.sweeps.job_folder import job_folders
from ares_exp.trajectories.episode_places import is_run
from ares_exp.trajectories.files.writer_lock import has_writer

FRESH_SEC = 3.0
"""How long a new state is waited for: a run tells it every two seconds while somebody looks."""
POLL_SEC = 0.1


@dataclass(frozen=True, slots=True)
class RunTarget:
    """A run.

    Attributes:
        path: Its directory.
    """

    path: Path

    @property
    def state(self) -> str:
        """How far it is: `under way`, `finished`, `killed`, …; `not begun` of a job that has no record yet."""
        return ShownRun(self.path).state.name if is_run(self.path) else "not begun"

    @property
    def is_under_way(self) -> bool:
        """Whether a process plays it."""
        return self.state == "under way"

    def status(self, *, fresh_sec: float = 0.0) -> RunStatus | None:
        """Returns the last state that it told; one that is told within so many seconds from now, if there is one."""
        run, asked = RunDir(self.path), time.time()
        if fresh_sec:
            look(run.control)
        status = read_status(run.status)
        while (status is None or status.written_at < asked) and time.time() < asked + fresh_sec:
            time.sleep(POLL_SEC)
            status = read_status(run.status)
        return status


@dataclass(frozen=True, slots=True)
class SweepTarget:
    """A sweep.

    Attributes:
        path: Its folder.
    """

    path: Path

    @property
    def jobs(self) -> Sequence[RunTarget]:
        """The jobs that have begun to write."""
        return [RunTarget(folder) for folder in job_folders(self.path)]

    @property
    def is_under_way(self) -> bool:
        """Whether a process begins its jobs, or plays one."""
        return has_writer(self.path) or any(job.is_under_way for job in self.jobs)


def target_of(path: Path) -> RunTarget | SweepTarget:
    """Returns what is at a path.

    Raises:
        ConfigError: It is neither a run nor a sweep.
    """
    if (path / SWEEP_RECORD).is_file():
        return SweepTarget(path)
    if not is_run(path):
        raise ConfigError(
            f"Expected the directory of a run, or the folder of a sweep, got {path}. One that still checks its tasks "
            "has written nothing yet."
        )
    return RunTarget(path)
