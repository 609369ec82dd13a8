"""One session of a W&B run: its numbers in one thread, its table and artifacts in another.

Online, W&B asks the service before it takes a table or an artifact. Where the service does not answer, the numbers
still arrive on the disk.
"""

from __future__ import annotations

import math
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_summary import RunSummary
from ares_exp.records.secrets import mask_known_secrets, scrub
from ares_exp.trackers.metrics import EpisodeRows, attempt_values, total_metrics
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_files import WandbFiles, WandbInputs, record_inputs
from ares_exp.trackers.wandb_service import close_run, first_line, folders_of, identity_of, open_run, sessions

if TYPE_CHECKING:
    import wandb

    from ares_exp.trackers.wandb_tracker import WandbTracker
    from ares_exp.trajectories.records import EpisodeTrajectory

FINISHED, WALL_SEC, OPTIMIZER_STEP = "progress/finished", "progress/wall_sec", "progress/optimizer_step"
"""The axes: finished episodes, seconds since the run was first started, and steps of a training."""
OBJECTIVE = "objective"
"""In the summary: the metric that a sweep is to maximise; the config key of that name chooses it."""
AXES = {
    **dict.fromkeys(("episode/*", "outcome/*", "progress/mean_reward"), FINISHED),
    **dict.fromkeys(("system/*", FINISHED), WALL_SEC),
    **dict.fromkeys(("train/*", "heldout/*"), OPTIMIZER_STEP),
}
STEPS_OF_A_SESSION = 10**6
"""Each session's W&B steps start at a multiple of it: offline, W&B starts every session with step 0."""
FINISH_SHARE = 0.55
"""Of the bound on the tracker's `finish`: how long W&B waits for the end of the run. Files have had their share before;
one that is cut short from outside is never confirmed, not even when it is uploaded later."""


class WandbRecording:
    """One session in W&B. No method raises; failures are reported. `place` is the line for the user about it."""

    def __init__(self, tracker: WandbTracker, info: RunInfo, *, online: bool, report: Callable[[str], None]) -> None:
        """Prepares for a session of a run with the settings of a tracker; `report` counts and logs a failure."""
        self.place: str | None = None
        self._tracker = tracker
        self._info = info
        self._online = online
        self._report = report
        self._identity = identity_of(info, project=tracker.project, entity=tracker.entity)
        self._run: wandb.Run | None = None
        self._files: WandbFiles | None = None
        self._failed = False
        self._started = threading.Event()
        self._start = min((result.started_at for result in info.earlier), default=time.time())
        self._rows = EpisodeRows()

    def start(self) -> None:
        """Opens the W&B run: online if that is wanted and the service answers, else offline."""
        for result in self._info.earlier:
            self._rows.add(result)
        with self._reported("could not be started, this run is not tracked"):
            with folders_of(self._info.run_dir, self._identity.id):
                run = self._open()
                entity = run.entity or self._identity.entity
                self._identity = self._identity.model_copy(update={"entity": entity})
                self._identity.write(self._info.run_dir)
                for axis in (FINISHED, WALL_SEC, OPTIMIZER_STEP):
                    run.define_metric(axis, hidden=axis != FINISHED)
                for key, axis in AXES.items():
                    run.define_metric(key, step_metric=axis)
                if before := len(sessions(self._info.run_dir)) - 1:
                    step = max(before * STEPS_OF_A_SESSION, run.step)
                    run.log({WALL_SEC: self._seconds(time.time())}, step=step)
            self._run, self.place = run, _place(run, self._info.run_dir)
        self._started.set()

    def start_files(self) -> None:
        """Records what the run builds upon, and logs the rows of earlier sessions."""
        self._started.wait()
        if (run := self._run) is None:
            return
        tracker, info = self._tracker, self._info
        settings = WandbInputs(
            run_dir=info.run_dir.absolute(),
            log_artifacts=tracker.log_artifacts,
            log_trajectories=tracker.log_trajectories,
            snapshots_limit_mb=tracker.snapshots_limit_mb,
        )
        with self._at_work("refused what the run builds upon"):
            self._files = WandbFiles(run, info.run_dir, settings)
            inputs = record_inputs(run, info, settings, limit_mb=tracker.task_set_limit_mb)
            if not run.offline:
                inputs.link(run, info.run_dir)
                inputs.model_copy(update={"linked": True}).write(info.run_dir)
            if tracker.log_artifacts and tracker.log_code:
                self._files.log_code()
        for result in info.earlier:
            self.add_to_table(result)

    def add_episode(self, result: EpisodeResult) -> None:
        """Logs the row of a finished episode."""
        row = self._rows.add(result)
        self._log({**row, WALL_SEC: self._seconds(result.finished_at)})

    def add_to_table(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Adds the row of a finished attempt or retry to the table."""
        if self._files is not None:
            with self._at_work("refused a row of the table"):
                self._files.add(result, trajectory)

    def add_system(self, sample: Mapping[str, float], at: float) -> None:
        """Logs the load of the runner at a time (epoch seconds)."""
        numbers = {key: value for key, value in sample.items() if isinstance(value, int | float)}
        self._log({**numbers, WALL_SEC: self._seconds(at)})

    def add_training(self, values: Mapping[str, float], step: int) -> None:
        """Logs numbers of a training at an optimizer step."""
        self._log({**values, OPTIMIZER_STEP: step})

    def add_order(self, line: Mapping[str, Any]) -> None:
        """Puts an order to the run into the config, by its id."""
        with self._reported("refused an order"):
            if self._run is not None and "id" in line:
                self._run.config.update({f"control/{line['id']}": dict(line)}, allow_val_change=True)  # type: ignore[no-untyped-call]

    def add_totals(self, summary: RunSummary) -> None:
        """Logs histograms, totals and statistics."""
        with self._reported("refused the totals"):
            if self._run is None:
                return
            import wandb

            values = attempt_values(summary)
            if any(values.values()):
                self._log({f"attempts/{name}": wandb.Histogram(one) for name, one in values.items() if one})
            totals = total_metrics(summary)
            if (objective := totals.get(f"stat/{self._info.config.get('objective', 'mean_reward')}")) is not None:
                totals[OBJECTIVE] = objective
            endless = [key for key, value in totals.items() if isinstance(value, float) and not math.isfinite(value)]
            self._run.summary.update({key: value for key, value in totals.items() if key not in endless})

    def end_files(self, summary: RunSummary) -> None:
        """Logs the rest of the table, and what the run made."""
        if self._files is not None:
            with self._at_work("refused an artifact"):
                self._files.end(summary.snapshot_dir, sum(result.snapshots for result in summary.results))

    def end(self, summary: RunSummary) -> None:
        """Finishes the W&B run."""
        run, self._run = self._run, None
        if run is None:
            return
        with self._reported("could not finish the run, what was recorded is on disk"):
            session = Path(run.dir).parent.name
            close_run(run, exit_code=0 if summary.complete else 1)
            if not (run.offline or self._failed):
                confirmed = (*self._identity.confirmed, session)
                self._identity.model_copy(update={"confirmed": confirmed}).write(self._info.run_dir)

    def _open(self) -> wandb.Run:
        tracker, info = self._tracker, self._info
        policy = info.config.get("policy")
        config = {
            **scrub(info.config),
            "provenance": scrub(info.provenance),
            "choices": dict(info.provenance.get("choices") or {}),
            "command": mask_known_secrets(shlex.join(info.provenance.get("argv") or [])),
            "model": policy.get("model") if isinstance(policy, Mapping) else None,
        }
        arguments = {
            "group": tracker.group or info.group,
            "job_type": tracker.job_type or info.job_type,
            "name": tracker.name or info.name,
            "tags": [*dict.fromkeys((*info.tags, *tracker.tags))],
            "config": config,
            "init_timeout": tracker.init_timeout_sec,
            "finish_timeout": FINISH_SHARE * tracker.finish_timeout_sec,
        }
        try:
            if self._online:
                return open_run(self._identity, info.run_dir, online=True, **arguments)
        except Exception as error:
            self._report(
                f"cannot be reached, recording offline in {info.run_dir / 'wandb'} instead (upload it later with "
                f"`ares-exp wandb sync {info.run_dir}`): {first_line(error)}"
            )
        return open_run(self._identity, info.run_dir, online=False, **arguments)

    def _log(self, row: Mapping[str, Any]) -> None:
        if self._run is not None:
            with self._reported("refused a row"):
                self._run.log(dict(row))

    def _seconds(self, at: float) -> float:
        return max(at - self._start, 0.0)

    @contextmanager
    def _at_work(self, otherwise: str) -> Iterator[None]:
        """Has W&B's folders in the run directory. Reports what fails."""
        with self._reported(otherwise), folders_of(self._info.run_dir, self._identity.id):
            yield

    @contextmanager
    def _reported(self, otherwise: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed = True
            self._report(f"{otherwise}: {first_line(error)}")


def _place(run: wandb.Run, run_dir: Path) -> str:
    if not run.offline:
        return f"W&B: {run.url}"
    shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    return f"W&B, offline; upload: ares-exp wandb sync {shlex.quote(str(shown))}"
