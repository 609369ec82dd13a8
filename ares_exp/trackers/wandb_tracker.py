"""The tracker for Weights & Biases (W&B). It works in background threads, so that the run never waits for W&B.

One thread records the metrics. Another thread records the table and the artifacts, because it can block while it logs
an artifact online. Metrics are written to the disk even if the service does not respond.
"""

from __future__ import annotations

import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from ares_exp.records.results import EpisodeResult, RunSummary
from ares_exp.records.secrets import mask_known_secrets, scrub
from ares_exp.records.terminal_text import shown_path
from ares_exp.trackers.metrics import EpisodeRows, attempt_values, total_metrics
from ares_exp.trackers.tracker import BackgroundWriter, RunInfo, TrackerBase, error_line
from ares_exp.trackers.wandb_run import (
    WandbFiles,
    WandbRecord,
    close_run,
    folders_in,
    open_run,
    sessions,
    uploaded_mark,
)

if TYPE_CHECKING:
    import wandb

    from ares_exp.trajectories.records import EpisodeTrajectory

FINISHED, WALL_SEC = "progress/finished", "progress/wall_sec"
"""Metrics that W&B uses for the x axes: finished episodes, and seconds since the first start of the run."""
AXES = {
    **dict.fromkeys(("episode/*", "outcome/*", "progress/mean_reward"), FINISHED),
    **dict.fromkeys(("system/*", FINISHED), WALL_SEC),
}
STEPS_OF_A_SESSION = 10**6  # session n (from 0) starts at W&B step n * 10**6, because offline, W&B would start at 0
MAX_WAITING = 100
"""Maximum number of writes that wait for W&B. While more writes wait, control commands and measurements of the process
are not recorded, and new rows of the table have no trajectory."""
FILES_SHARE, CLOSE_SHARE = 0.4, 0.55
"""Shares of `finish_timeout_sec`: for writing the table and artifacts, and for W&B's own time limit when it closes the
run. Their sum is below 1, so that the tracker does not stop waiting while W&B still closes the run."""

_Seconds = Annotated[float, pydantic.Field(gt=0)]
_Megabytes = Annotated[float, pydantic.Field(ge=0)]


@pydantic.dataclasses.dataclass(kw_only=True, eq=False, repr=False, config=pydantic.ConfigDict(extra="forbid"))
class WandbTracker(TrackerBase):
    """Records a run with Weights & Biases, online or offline. `docs/trackers.md` lists the recorded data.

    All files are in the `wandb` folder of the run directory. To upload an offline run later, use `wandb sync`, or
    `ares-exp wandb sync RUN` to include links to its inputs. A resumed run continues its W&B run. If a W&B sweep
    started the process, the tracker uses the W&B run that the sweep has chosen. Use each tracker object for only one
    run.

    Attributes:
        project: W&B project.
        entity: W&B user or team; `None` is the account's default.
        group: W&B group. `None` uses the group of the run; all jobs of a sweep have the same group.
        job_type: W&B job type. `None` uses the kind of the run: `run`, `replay`, `branch` or `train`.
        name: Display name. `None` uses the name of the run.
        tags: Tags of the W&B run.
        mode: `auto` uses the environment variable WANDB_MODE. If the variable is not set, the mode is `online` if W&B
            finds a key (WANDB_API_KEY, or the entry of `wandb login` in the netrc file), otherwise `offline`.
        log_artifacts: Whether the task set, trajectories and snapshots are logged as artifacts.
        log_trajectories: Whether the table of episodes contains a readable page for each trajectory.
        log_code: Whether the source files of this package are logged as an artifact (requires `log_artifacts`).
        task_set_limit_mb: Maximum size in MB of an uploaded task set. A larger task set is replaced by the tasks'
            digests.
        snapshots_limit_mb: Maximum size in MB of an uploaded snapshot store. A larger store is replaced by a file list.
        init_timeout_sec: Time limit in seconds for reaching the service. If it is exceeded, the run is recorded
            offline.
        finish_timeout_sec: Time limit of `finish` in seconds, including uploads. Files that are not uploaded in time
            stay on disk.
    """

    project: Annotated[str, pydantic.Field(min_length=1)] = "ares_exp"
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["auto", "offline", "online", "disabled"] = "auto"
    log_artifacts: bool = True
    log_trajectories: bool = True
    log_code: bool = False
    task_set_limit_mb: _Megabytes = 20.0
    snapshots_limit_mb: _Megabytes = 100.0
    init_timeout_sec: _Seconds = 10.0
    finish_timeout_sec: _Seconds = 30.0

    def __post_init__(self) -> None:
        self._numbers = BackgroundWriter("W&B")
        self._files_writer = BackgroundWriter("W&B's table and artifacts")
        self._rows = EpisodeRows()
        self._began = 0.0
        self._folder = Path()
        self._opened = threading.Event()
        self._run: wandb.Run | None = None
        self._files: WandbFiles | None = None
        self._place: str | None = None

    @property
    def failures(self) -> int:
        """Number of W&B failures so far."""
        return self._numbers.failures + self._files_writer.failures

    @property
    def place(self) -> str | None:
        """URL of the W&B run, or the command that uploads an offline run."""
        return self._place

    def start(self, run: RunInfo) -> None:
        """Starts the tracker. Imports and initialises W&B in the background."""
        asked = os.environ.get("WANDB_MODE", "").lower() if self.mode == "auto" else self.mode
        if asked == "disabled":
            return
        self._folder = run.run_dir / "wandb"
        self._began = min((result.started_at for result in run.earlier), default=time.time())
        self._rows = EpisodeRows(run.earlier)
        self._numbers.start()
        self._numbers.do(lambda: self._open(run, asked if asked in ("online", "offline") else "auto"))
        self._files_writer.start()
        self._do_with_files(lambda files: files.start(run, limit_mb=self.task_set_limit_mb))
        if self.log_artifacts and self.log_code:
            self._do_with_files(WandbFiles.log_code)

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records a finished episode. Returns immediately."""
        self._log(self._rows.add(result), at=result.finished_at)
        shown = trajectory if self.log_trajectories and self._files_writer.waiting < MAX_WAITING else None
        self._do_with_files(lambda files: files.add(result, shown))

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Records measurements of the run's process. Returns immediately."""
        if self._numbers.waiting < MAX_WAITING:
            self._log(sample, at=time.time())

    def log_order(self, line: Mapping[str, Any]) -> None:
        """Adds a received control command to the W&B config, as `control/ID`. Returns immediately."""
        if "id" in line and self._numbers.waiting < MAX_WAITING:
            order = {f"control/{line['id']}": dict(line)}
            self._do_with_run(lambda run: run.config.update(order, allow_val_change=True))  # type: ignore[no-untyped-call]

    def finish(self, summary: RunSummary) -> None:
        """Records the totals and ends the W&B run, within `finish_timeout_sec`. Idempotent."""
        deadline = time.monotonic() + self.finish_timeout_sec
        self._do_with_run(lambda run: self._log_totals(run, summary))
        self._do_with_files(lambda files: files.end(summary.snapshot_dir, summary.results))
        self._files_writer.finish(FILES_SHARE * self.finish_timeout_sec)
        self._do_with_run(lambda run: self._close(run, summary))
        self._numbers.finish(max(deadline - time.monotonic(), 0.0))

    def _log(self, row: Mapping[str, Any], *, at: float) -> None:
        """Logs metrics that were measured at the time `at` (epoch seconds)."""
        self._do_with_run(lambda run: run.log({**row, WALL_SEC: max(at - self._began, 0.0)}))

    def _do_with_run(self, act: Callable[[wandb.Run], object]) -> None:
        self._numbers.do(lambda: act(self._run) if self._run is not None else None)

    def _do_with_files(self, act: Callable[[WandbFiles], object]) -> None:
        def act_in_folder() -> None:
            self._opened.wait()
            if self._run is not None and self._files is not None:
                with folders_in(self._folder, self._run.id):
                    act(self._files)

        self._files_writer.do(act_in_folder)

    def _open(self, info: RunInfo, mode: str) -> None:
        """Opens the W&B run: online if requested and the service responds, otherwise offline."""
        try:
            record = WandbRecord.of(info, vars(self))
            with folders_in(self._folder, record.id):
                run = self._open_run(info, record, mode)
                record = record.write(info.run_dir, entity=run.entity or record.entity)
                self._files = WandbFiles(run, info.run_dir, record)
                for axis in (FINISHED, WALL_SEC):
                    run.define_metric(axis, hidden=axis != FINISHED)
                for key, axis in AXES.items():
                    run.define_metric(key, step_metric=axis)
                if before := len(sessions(info.run_dir)) - 1:
                    run.log({WALL_SEC: time.time() - self._began}, step=max(before * STEPS_OF_A_SESSION, run.step))
            sync = f"W&B (offline). To upload the run: ares-exp wandb sync {shlex.quote(str(shown_path(info.run_dir)))}"
            self._run, self._place = run, sync if run.offline else f"W&B: {run.url}"
        except Exception as error:
            self._numbers.report(f"could not be started, so this run is not tracked: {error_line(error)}")
        finally:
            self._opened.set()

    def _open_run(self, info: RunInfo, record: WandbRecord, mode: str) -> wandb.Run:
        arguments: dict[str, Any] = {
            "group": self.group or info.group,
            "job_type": self.job_type or info.job_type,
            "name": self.name or info.name,
            "tags": [*dict.fromkeys((*info.tags, *self.tags))],
            "config": {
                **scrub(info.config),
                "provenance": scrub(info.provenance),
                "choices": dict(info.provenance.get("choices") or {}),
                "command": mask_known_secrets(shlex.join(info.provenance.get("argv") or [])),
                "model": (info.config.get("policy") or {}).get("model"),
            },
        }
        timeouts = {"init_timeout": self.init_timeout_sec, "finish_timeout": CLOSE_SHARE * self.finish_timeout_sec}
        try:
            if mode != "offline":
                return open_run(record, info.run_dir, mode=mode, settings=timeouts, **arguments)
        except Exception as error:
            self._numbers.report(
                f"cannot be reached, so the run is recorded in {self._folder} (upload it later with "
                f"`ares-exp wandb sync {info.run_dir}`): {error_line(error)}"
            )
        return open_run(record, info.run_dir, mode="offline", settings=timeouts, **arguments)

    def _log_totals(self, run: wandb.Run, summary: RunSummary) -> None:
        """Logs histograms, totals and statistics. Also logs the metric that a sweep maximises as `objective`."""
        import wandb

        if values := {name: one for name, one in attempt_values(summary).items() if one}:
            run.log({f"attempts/{name}": wandb.Histogram(one) for name, one in values.items()})
        totals = total_metrics(summary)
        chosen = run.config.get("objective", "mean_reward")  # type: ignore[no-untyped-call]
        totals["objective"] = totals.get(f"stat/{chosen}", math.nan)
        run.summary.update({key: n for key, n in totals.items() if not isinstance(n, float) or math.isfinite(n)})

    def _close(self, run: wandb.Run, summary: RunSummary) -> None:
        session = Path(run.dir).parent
        try:
            close_run(run, exit_code=0 if summary.complete else 1)
        except Exception as error:
            self._numbers.report(f"could not finish the run, but the recorded data is on disk: {error_line(error)}")
        if not (run.offline or self.failures):
            uploaded_mark(session / f"run-{run.id}.wandb").touch()
