"""One session of a run, as W&B gets it. Lives in the tracker's thread: whatever W&B does, only that thread waits."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.results import EpisodeResult, RunSummary
from ares_exp.trackers.metrics import EpisodeRows, attempt_values, total_metrics
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_recording import artifacts
from ares_exp.trackers.wandb_recording.episodes_table import EpisodesTable
from ares_exp.trackers.wandb_recording.identity import identity_of
from ares_exp.trackers.wandb_recording.options import WandbOptions
from ares_exp.trackers.wandb_recording.record_file import next_step
from ares_exp.trackers.wandb_recording.service import Report, end_service, first_line, open_run, wandb_at_work

if TYPE_CHECKING:
    import wandb

    from ares_exp.trajectories.records import EpisodeTrajectory

FINISHED, WALL_SEC = "progress/finished", "progress/wall_sec"
"""The two axes: tries that have finished, and seconds since the run was first begun."""
OBJECTIVE = "objective"
"""In the summary: what a sweep is to maximise, the metric that the config key of that name chooses."""
EPISODES_AXIS_KEYS = ("episode/*", "outcome/*", "progress/mean_reward")
TIME_AXIS_KEYS = ("system/*", FINISHED)


class WandbRecording:
    """What happens in one session, told to W&B. No method raises; what goes wrong is reported."""

    def __init__(self, options: WandbOptions, info: RunInfo, *, online: bool, report: Report) -> None:
        """Opens nothing yet."""
        self._options = options
        self._info = info
        self._online = online
        self._report = report
        self._began = min((result.started_at for result in info.earlier), default=time.time())
        self._identity = identity_of(info, project=options.project, entity=options.entity)
        self._scratch = info.run_dir / "wandb" / "scratch"
        self._rows = EpisodeRows()
        self._run: wandb.Run | None = None
        self._table: EpisodesTable | None = None
        self._step = 0

    def begin(self) -> None:
        """Opens the W&B run, and logs what the run builds upon."""
        for result in self._info.earlier:
            self._rows.add(result)
        with self._wandb("could not be started, this run is not tracked") as folder:
            folder.mkdir(parents=True, exist_ok=True)
            step = next_step(self._info.run_dir) if self._info.resumed else 0
            run = open_run(self._options, self._info, self._identity, online=self._online, report=self._report)
            self._run, self._step = run, max(step, run.step)
            self._identity = replace(self._identity, entity=run.entity or self._identity.entity)
            self._define_metrics(run)
            self._table = EpisodesTable(
                self._log, folder, pages=self._options.log_trajectories, earlier=self._identity.table
            )
            self._identity.write(self._info.run_dir)
            for result in self._info.earlier[self._table.rows :]:  # a killed session had not logged them yet
                self._table.add(result, None)
        if self._run is not None and self._options.log_artifacts:
            with self._wandb("refused what the run builds upon"):
                self._use_inputs(self._run)

    def add_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None) -> None:
        """Logs the row of a finished try, and adds it to the table."""
        row = self._rows.add(result)
        if self._run is None or self._table is None:
            return
        with self._wandb("refused a row"):
            self._log({**row, WALL_SEC: max(result.finished_at - self._began, 0.0)})
        with self._wandb("refused a row of the table"):
            if self._table.add(result, trajectory):
                self._remember_table(self._table)

    def add_system(self, sample: Mapping[str, float], at: float) -> None:
        """Logs how the runner did at a time (epoch seconds)."""
        numbers = {key: value for key, value in sample.items() if isinstance(value, int | float)}
        if self._run is not None:
            with self._wandb("refused a sample"):
                self._log({**numbers, WALL_SEC: max(at - self._began, 0.0)})

    def end(self, summary: RunSummary) -> None:
        """Logs histograms, totals and artifacts, and finishes the W&B run."""
        run, table = self._run, self._table
        if run is None or table is None:
            return
        with self._wandb("refused the end of the table"):
            if table.flush():
                self._remember_table(table)
        with self._wandb("refused the totals"):
            self._log_totals(run, summary)
        if self._options.log_artifacts:
            with self._wandb("refused an artifact"):
                self._log_outputs(run, summary)
        with self._wandb("could not finish the run, what was recorded is on disk"):
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._run = None
            run.finish(exit_code=0 if summary.complete else 1)
            end_service()

    def _define_metrics(self, run: wandb.Run) -> None:
        for axis in (FINISHED, WALL_SEC):
            run.define_metric(axis, hidden=axis == WALL_SEC)
        for key in EPISODES_AXIS_KEYS:
            run.define_metric(key, step_metric=FINISHED)
        for key in TIME_AXIS_KEYS:
            run.define_metric(key, step_metric=WALL_SEC)

    def _log(self, row: dict[str, Any]) -> None:
        # Steps of our own: offline, W&B begins every session anew with 0.
        run, step = self._run, self._step
        if run is not None:
            self._step += 1
            run.log(row, step=step, commit=True)

    def _remember_table(self, table: EpisodesTable) -> None:
        self._identity = replace(self._identity, table=table.state)
        self._identity.write(self._info.run_dir)

    def _use_inputs(self, run: wandb.Run) -> None:
        """Task set and parents. `use_artifact` is for online runs alone; what it logs, an offline run can log too."""
        used = [
            artifacts.task_set_artifact(self._info, self._scratch, limit_mb=self._options.task_set_limit_mb),
            *artifacts.parent_artifacts(self._info),
        ]
        lineage = []
        for artifact in used:
            if artifact is not None:
                run._log_artifact(artifact, use_after_commit=True)
                lineage.append({"name": artifact.name.partition(":")[0], "digest": artifact.digest})
        run.config.update({"inputs": lineage}, allow_val_change=True)  # type: ignore[no-untyped-call]

    def _log_totals(self, run: wandb.Run, summary: RunSummary) -> None:
        import wandb

        histograms = {
            f"attempts/{name}": wandb.Histogram(values) for name, values in attempt_values(summary).items() if values
        }
        if histograms:
            self._log(histograms)
        totals = total_metrics(summary)
        if (objective := totals.get(f"stat/{self._info.config.get('objective', 'mean_reward')}")) is not None:
            totals[OBJECTIVE] = objective
        run.summary.update({key: value for key, value in totals.items() if not _is_endless(value)})

    def _log_outputs(self, run: wandb.Run, summary: RunSummary) -> None:
        run_dir, options = self._info.run_dir, self._options
        outputs = [
            artifacts.trajectories_artifact(run_dir, run.id),
            artifacts.snapshots_artifact(summary, run_dir, run.id, self._scratch, limit_mb=options.snapshots_limit_mb),
            artifacts.code_artifact(run.id) if options.log_code else None,
        ]
        for artifact in outputs:
            if artifact is not None:
                run.log_artifact(artifact)

    @contextmanager
    def _wandb(self, otherwise: str) -> Iterator[Path]:
        """W&B at work, its files in the run directory; gives the folder for files on their way. Reports what fails."""
        try:
            with wandb_at_work(self._info.run_dir, self._identity.id):
                yield self._scratch
        except Exception as error:
            self._report(f"{otherwise}: {first_line(error)}")


def _is_endless(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
