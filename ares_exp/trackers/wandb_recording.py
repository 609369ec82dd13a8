"""The numbers of one session of a W&B run. Lives in a thread of the tracker, which alone waits for W&B."""

from __future__ import annotations

import math
import shlex
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_summary import RunSummary
from ares_exp.trackers.metrics import EpisodeRows, attempt_values, total_metrics
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_identity import identity_of
from ares_exp.trackers.wandb_options import WandbOptions
from ares_exp.trackers.wandb_service import Report, close_run, first_line, folders_of, open_run

if TYPE_CHECKING:
    import wandb

FINISHED, WALL_SEC, OPTIMIZER_STEP = "progress/finished", "progress/wall_sec", "progress/optimizer_step"
"""The axes: finished episodes, seconds since the run was first started, and steps of a training."""
OBJECTIVE = "objective"
"""In the summary: the metric that a sweep is to maximise; the config key of that name chooses it."""
BY_NUMBER = ("episode/*", "outcome/*", "progress/mean_reward")
BY_TIME = ("system/*", FINISHED)
BY_STEP = ("train/*", "heldout/*")
STEPS_AHEAD, RENEWED_AFTER = 1000, 200
"""So many W&B steps are written down as used before they are; renewed after so many rows, tables come in between."""


class WandbRecording:
    """The numbers of one session in W&B. No method raises; failures are reported.

    Attributes:
        info: The run.
        options: The tracker's settings.
        identity: Which W&B run it is.
        run: That run while it is open, else `None`.
        started: Set when it is known whether there is a W&B run.
        place: Where that can be looked at, or how it gets there, for the user; `None` without a W&B run.
        report: Counts and logs a failure.
    """

    def __init__(self, options: WandbOptions, info: RunInfo, *, online: bool, report: Report) -> None:
        """Prepares for a session.

        Args:
            options: The tracker's settings.
            info: The run.
            online: Whether the W&B run is to be online.
            report: Counts and logs a failure.
        """
        self.info = info
        self.options = options
        self.identity = identity_of(info, project=options.project, entity=options.entity)
        self.run: wandb.Run | None = None
        self.started = threading.Event()
        self.place: str | None = None
        self._online = online
        self.report = report
        self._rows_left = 0
        self._start = min((result.started_at for result in info.earlier), default=time.time())
        self._rows = EpisodeRows()
        self._has_training_axis = False

    def start(self) -> None:
        """Opens the W&B run."""
        for result in self.info.earlier:
            self._rows.add(result)
        folders = folders_of(self.info.run_dir, self.identity.id)
        with self.reported("could not be started, this run is not tracked"), folders:
            run = open_run(self.options, self.info, self.identity, online=self._online, report=self.report)
            step = self.identity.steps
            self.identity = replace(self.identity, entity=run.entity or self.identity.entity, uploaded=False)
            for axis in (FINISHED, WALL_SEC):
                run.define_metric(axis, hidden=axis == WALL_SEC)
            for key in BY_NUMBER:
                run.define_metric(key, step_metric=FINISHED)
            for key in BY_TIME:
                run.define_metric(key, step_metric=WALL_SEC)
            self._reserve(max(step, run.step))
            if step > run.step:  # offline, W&B starts every session with step 0
                run.log({WALL_SEC: self._seconds(time.time())}, step=step)
            self.run, self.place = run, _place(run, self.info.run_dir)
        self.started.set()

    def add_episode(self, result: EpisodeResult) -> None:
        """Logs the row of a finished episode."""
        row = self._rows.add(result)
        with self.reported("refused a row"):
            self._log({**row, WALL_SEC: self._seconds(result.finished_at)})

    def add_system(self, sample: Mapping[str, float], at: float) -> None:
        """Logs the load of the runner at a time (epoch seconds)."""
        numbers = {key: value for key, value in sample.items() if isinstance(value, int | float)}
        with self.reported("refused a sample"):
            self._log({**numbers, WALL_SEC: self._seconds(at)})

    def add_training(self, values: Mapping[str, float], step: int) -> None:
        """Logs numbers of a training at an optimizer step."""
        with self.reported("refused numbers of the training"):
            if self.run is not None and not self._has_training_axis:
                self._has_training_axis = True
                self.run.define_metric(OPTIMIZER_STEP, hidden=True)
                for key in BY_STEP:
                    self.run.define_metric(key, step_metric=OPTIMIZER_STEP)
            self._log({**values, OPTIMIZER_STEP: step})

    def add_order(self, line: Mapping[str, Any]) -> None:
        """Puts an order to the run into the config, by its id."""
        with self.reported("refused an order"):
            if self.run is not None and "id" in line:
                self.run.config.update({f"control/{line['id']}": dict(line)}, allow_val_change=True)  # type: ignore[no-untyped-call]

    def add_totals(self, summary: RunSummary) -> None:
        """Logs histograms, totals and statistics."""
        with self.reported("refused the totals"):
            if self.run is None:
                return
            import wandb

            values = attempt_values(summary)
            if any(values.values()):
                self._log({f"attempts/{name}": wandb.Histogram(one) for name, one in values.items() if one})
            totals = total_metrics(summary)
            if (objective := totals.get(f"stat/{self.info.config.get('objective', 'mean_reward')}")) is not None:
                totals[OBJECTIVE] = objective
            self.run.summary.update({key: value for key, value in totals.items() if not _is_endless(value)})

    def end(self, summary: RunSummary, *, files_are_logged: bool) -> None:
        """Finishes the W&B run.

        Args:
            summary: The run's totals.
            files_are_logged: Whether the W&B run has its table and artifacts.
        """
        run, self.run = self.run, None
        if run is None:
            return
        with self.reported("could not finish the run, what was recorded is on disk"):
            steps, session = run.step, Path(run.dir).parent.name
            close_run(run, exit_code=0 if summary.complete else 1)
            confirmed = self.identity.confirmed if run.offline else (*self.identity.confirmed, session)
            self.identity = replace(self.identity, steps=steps, uploaded=files_are_logged, confirmed=confirmed)
            self.identity.write(self.info.run_dir)

    @contextmanager
    def reported(self, otherwise: str) -> Iterator[None]:
        """Reports failures."""
        try:
            yield
        except Exception as error:
            self.report(f"{otherwise}: {first_line(error)}")

    def _log(self, row: Mapping[str, Any]) -> None:
        if self.run is None:
            return
        self._rows_left -= 1
        if self._rows_left < 0:
            self._reserve(self.run.step)
        self.run.log(dict(row))

    def _reserve(self, step: int) -> None:
        """Writes down more steps from `step` on than are used before the next time."""
        self.identity = replace(self.identity, steps=step + STEPS_AHEAD)
        self.identity.write(self.info.run_dir)
        self._rows_left = RENEWED_AFTER

    def _seconds(self, at: float) -> float:
        return max(at - self._start, 0.0)


def _place(run: wandb.Run, run_dir: Path) -> str:
    if not run.offline:
        return f"W&B: {run.url}"
    shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    return f"W&B, offline; upload: ares-exp wandb sync {shlex.quote(str(shown))}"


def _is_endless(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
