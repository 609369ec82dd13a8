"""Weights & Biases as a tracker. W&B lives in a thread of its own, so that the run never waits for it."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from ares_exp.results import EpisodeResult, RunSummary
from ares_exp.run_dir import RunDir
from ares_exp.secrets import scrub
from ares_exp.trackers.metrics import EpisodeRows, total_metrics
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    import wandb

    from ares_exp.trajectories.records import EpisodeTrajectory

Mode = Literal["auto", "offline", "online", "disabled"]
_Inbox = queue.SimpleQueue[EpisodeResult | RunSummary]
_Seconds = Annotated[float, pydantic.Field(gt=0)]

_logger = logging.getLogger(__name__)
# W&B's service process and its environment variables belong to the whole process.
_one_tracker_at_a_time = threading.Lock()


class WandbTracker:
    """Records a run with Weights & Biases: a row per finished episode, the totals, and the run's files as an artifact.

    All files stay in the `wandb` folder of the run directory; an offline run is uploaded later with `wandb sync`.
    """

    @pydantic.validate_call
    def __init__(
        self,
        *,
        project: Annotated[str, pydantic.Field(min_length=1)] = "ares_exp",
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        name: str | None = None,
        tags: tuple[str, ...] = (),
        mode: Mode = "auto",
        log_artifacts: bool = True,
        init_timeout_sec: _Seconds = 10.0,
        finish_timeout_sec: _Seconds = 30.0,
    ) -> None:
        """Keeps the settings; W&B itself is imported by `start`, in the background.

        Args:
            project: W&B project.
            entity: W&B user or team; `None` is the account's default.
            group: W&B group; `None` takes the run's (a sweep is one group).
            job_type: W&B job type; `None` takes the run's.
            name: Display name; `None` takes the run's.
            tags: Labels beside the run's own.
            mode: `auto` obeys the environment variable WANDB_MODE, else is `online` when WANDB_API_KEY is set, else
                `offline`.
            log_artifacts: Whether `episodes.jsonl` and the trajectories become an artifact of the W&B run.
            init_timeout_sec: Bound on reaching the service, after which the run is recorded offline.
            finish_timeout_sec: Bound on `finish`, uploads included; what is not uploaded by then stays on disk.
        """
        self._project = project
        self._entity = entity
        self._group = group
        self._job_type = job_type
        self._name = name
        self._tags = tags
        self._mode = mode
        self._log_artifacts = log_artifacts
        self._init_timeout_sec = init_timeout_sec
        self._finish_timeout_sec = finish_timeout_sec
        self._failures = 0
        self._inbox: _Inbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def failures(self) -> int:
        """How many times W&B failed so far."""
        return self._failures

    def start(self, run: RunInfo) -> None:
        """Begins. W&B is imported and initialised in the background."""
        mode = _effective_mode(self._mode)
        if mode == "disabled":
            return
        folder = run.run_dir / "wandb"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._report(f"cannot write in {folder}, this run is not tracked: {error.strerror}")
            return
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._record, args=(run, mode, self._inbox), name="tracker", daemon=True)
        self._thread.start()

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records a finished episode. Returns at once."""
        if self._thread is not None:
            self._inbox.put(result)

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Nothing yet."""

    def finish(self, summary: RunSummary) -> None:
        """Records the totals and ends the W&B run, within `finish_timeout_sec`. Idempotent."""
        if self._thread is None:
            return
        self._inbox.put(summary)
        self._thread.join(self._finish_timeout_sec)
        if self._thread.is_alive():
            self._report(f"did not finish within {self._finish_timeout_sec:g} s; what was recorded is on disk")
        self._thread = None

    def _record(self, info: RunInfo, mode: str, inbox: _Inbox) -> None:
        """The life of the thread: opens the W&B run, logs what arrives, closes after the summary."""
        run: wandb.Run | None = None
        rows = EpisodeRows()
        try:
            with _files_in(info.run_dir / "wandb"):
                run = self._open(info, mode)
        except Exception as error:
            self._report(f"could not be started, this run is not tracked: {_first_line(error)}")
        while isinstance(item := inbox.get(), EpisodeResult):
            row = rows.add(item)
            if run is not None:
                self._log(run, row)
        if run is not None:
            with _files_in(info.run_dir / "wandb"):
                self._close(run, info, item)

    def _open(self, info: RunInfo, mode: str) -> wandb.Run:
        if mode == "online":
            try:
                return self._init(info, "online")
            except Exception as error:
                self._report(
                    f"cannot be reached, recording offline in {info.run_dir / 'wandb'} instead "
                    f"(upload it later with `wandb sync`): {_first_line(error)}"
                )
                _end_service()
        return self._init(info, "offline")

    def _init(self, info: RunInfo, mode: Literal["online", "offline"]) -> wandb.Run:
        import wandb

        hooks = sys.exit, sys.excepthook
        # Silent for the whole process, not for the run alone: a W&B that lacks a key would else ask for one.
        wandb.setup(settings=wandb.Settings(silent=True))
        try:
            run = wandb.init(
                project=self._project,
                entity=self._entity,
                group=self._group or info.group,
                job_type=self._job_type or info.job_type,
                name=self._name or info.name,
                tags=[*dict.fromkeys((*info.tags, *self._tags))],
                id=_plain(info.run_id),
                config={**scrub(info.config), "provenance": scrub(info.provenance)},
                dir=str(info.run_dir),
                mode=mode,
                resume="allow",
                reinit="create_new",
                settings=self._settings(),
            )
        finally:
            # W&B's hooks would print a second traceback and wrap every exit.
            sys.exit, sys.excepthook = hooks
        run.define_metric("progress/finished", hidden=True)
        for prefix in ("episode/*", "outcome/*", "progress/mean_reward"):
            run.define_metric(prefix, step_metric="progress/finished")
        return run

    def _settings(self) -> wandb.Settings:
        import wandb

        return wandb.Settings(
            silent=True,
            console="off",
            init_timeout=self._init_timeout_sec,
            finish_timeout=0.9 * self._finish_timeout_sec,
            finish_timeout_raises=True,
            # The run's own provenance is free of secrets; W&B's has the bare command line and the git remote.
            x_disable_meta=True,
            # Its monitor is a process that leaves a socket in the temporary directory when a run is short.
            x_disable_stats=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            save_code=False,
        )

    def _log(self, run: wandb.Run, row: dict[str, float]) -> None:
        try:
            run.log(row)
        except Exception as error:
            self._report(f"refused a row: {_first_line(error)}")

    def _close(self, run: wandb.Run, info: RunInfo, summary: RunSummary) -> None:
        try:
            run.summary.update(total_metrics(summary))
            if self._log_artifacts:
                _log_files(run, RunDir(info.run_dir))
        except Exception as error:
            self._report(f"refused the summary or the artifact: {_first_line(error)}")
        try:
            run.finish(exit_code=0 if summary.complete else 1)
            _end_service()
        except Exception as error:
            self._report(f"could not finish the run, what was recorded is on disk: {_first_line(error)}")

    def _report(self, what: str) -> None:
        """Counts a failure; the first is a warning, the others are for the debug log."""
        self._failures += 1
        _logger.log(logging.WARNING if self._failures == 1 else logging.DEBUG, "W&B %s", what)


def _effective_mode(mode: Mode) -> str:
    if mode != "auto":
        return mode
    asked = os.environ.get("WANDB_MODE", "").lower()
    if asked in {"offline", "online", "disabled"}:
        return asked
    return "online" if os.environ.get("WANDB_API_KEY") else "offline"


@contextlib.contextmanager
def _files_in(folder: Path) -> Iterator[None]:
    """Points W&B's own folders below `folder`, for one tracker at a time: they are set by environment variables."""
    values = {
        "WANDB_DATA_DIR": str(folder),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        # Else an offline run, too, calls home.
        "WANDB_ERROR_REPORTING": os.environ.get("WANDB_ERROR_REPORTING", "false"),
    }
    with _one_tracker_at_a_time:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _end_service() -> None:
    """Ends W&B's service process, unless another run of this process uses it.

    Only then are the files whole, its threads and exit hook gone, and is the id of a run that failed to open free.
    """
    import wandb

    if wandb.setup().most_recent_active_run is None:
        wandb.teardown()


def _log_files(run: wandb.Run, run_dir: RunDir) -> None:
    """Logs the episodes and the trajectories as an artifact; the trajectories, which never change, are not copied."""
    import wandb

    artifact = wandb.Artifact(f"episodes-{run.id}", type="episodes")
    if run_dir.episodes.exists():
        artifact.add_file(str(run_dir.episodes), skip_cache=True)
    for path in sorted(run_dir.trajectories.rglob("*.json*")):
        name = str(path.relative_to(run_dir.path))
        artifact.add_file(str(path), name=name, policy="immutable", skip_cache=True)
    run.log_artifact(artifact)


def _plain(name: str) -> str:
    """`name` with what W&B does not take in a run id or an artifact's name replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
