"""The numbers of one session of a run, as W&B gets them. Lives in a thread of the tracker; only that waits for W&B."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ares_exp.results import EpisodeResult
from ares_exp.run_summary import RunSummary
from ares_exp.trackers.metrics import EpisodeRows, attempt_values, total_metrics
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_recording.identity import identity_of
from ares_exp.trackers.wandb_recording.options import WandbOptions
from ares_exp.trackers.wandb_recording.record_file import next_step
from ares_exp.trackers.wandb_recording.service import Report, end_service, first_line, folders_of, open_run

if TYPE_CHECKING:
    import wandb

FINISHED, WALL_SEC = "progress/finished", "progress/wall_sec"
"""The two axes: tries that have finished, and seconds since the run was first begun."""
OBJECTIVE = "objective"
"""In the summary: what a sweep is to maximise, the metric that the config key of that name chooses."""
BY_NUMBER = ("episode/*", "outcome/*", "progress/mean_reward")
BY_TIME = ("system/*", FINISHED)


class WandbRecording:
    """What happens in one session, told to W&B. No method raises; what goes wrong is reported.

    Attributes:
        info: The run.
        options: The tracker's settings.
        identity: Which W&B run it is.
        run: That run while it is open, else `None`.
        begun: Set when it is known whether there is a W&B run.
    """

    def __init__(self, options: WandbOptions, info: RunInfo, *, online: bool, report: Report) -> None:
        """Opens nothing yet."""
        self.info = info
        self.options = options
        self.identity = identity_of(info, project=options.project, entity=options.entity)
        self.run: wandb.Run | None = None
        self.begun = threading.Event()
        self._online = online
        self._report = report
        self._start = min((result.started_at for result in info.earlier), default=time.time())
        self._rows = EpisodeRows()

    def begin(self) -> None:
        """Opens the W&B run."""
        for result in self.info.earlier:
            self._rows.add(result)
        with self.reported("could not be started, this run is not tracked"), folders_of(self.info, self.identity.id):
            step = next_step(self.info.run_dir) if self.info.resumed else 0
            run = open_run(self.options, self.info, self.identity, online=self._online, report=self._report)
            self.identity = replace(self.identity, entity=run.entity or self.identity.entity)
            self.identity.write(self.info.run_dir)
            for axis in (FINISHED, WALL_SEC):
                run.define_metric(axis, hidden=axis == WALL_SEC)
            for key in BY_NUMBER:
                run.define_metric(key, step_metric=FINISHED)
            for key in BY_TIME:
                run.define_metric(key, step_metric=WALL_SEC)
            if step > run.step:  # offline, W&B begins every session with step 0
                run.log({WALL_SEC: self._seconds(time.time())}, step=step)
            self.run = run
        self.begun.set()

    def add_episode(self, result: EpisodeResult) -> None:
        """Logs the row of a finished try."""
        row = self._rows.add(result)
        with self.reported("refused a row"):
            if self.run is not None:
                self.run.log({**row, WALL_SEC: self._seconds(result.finished_at)})

    def add_system(self, sample: Mapping[str, float], at: float) -> None:
        """Logs how the runner did at a time (epoch seconds)."""
        numbers = {key: value for key, value in sample.items() if isinstance(value, int | float)}
        with self.reported("refused a sample"):
            if self.run is not None:
                self.run.log({**numbers, WALL_SEC: self._seconds(at)})

    def add_totals(self, summary: RunSummary) -> None:
        """Logs histograms, totals and statistics."""
        with self.reported("refused the totals"):
            if self.run is None:
                return
            import wandb

            values = attempt_values(summary)
            if any(values.values()):
                self.run.log({f"attempts/{name}": wandb.Histogram(one) for name, one in values.items() if one})
            totals = total_metrics(summary)
            if (objective := totals.get(f"stat/{self.info.config.get('objective', 'mean_reward')}")) is not None:
                totals[OBJECTIVE] = objective
            self.run.summary.update({key: value for key, value in totals.items() if not _is_endless(value)})

    def end(self, summary: RunSummary) -> None:
        """Finishes the W&B run."""
        run, self.run = self.run, None
        if run is None:
            return
        with self.reported("could not finish the run, what was recorded is on disk"):
            run.finish(exit_code=0 if summary.complete else 1)
            end_service()

    @contextmanager
    def reported(self, otherwise: str) -> Iterator[None]:
        """Reports what fails."""
        try:
            yield
        except Exception as error:
            self._report(f"{otherwise}: {first_line(error)}")

    def _seconds(self, at: float) -> float:
        return max(at - self._start, 0.0)


def _is_endless(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
