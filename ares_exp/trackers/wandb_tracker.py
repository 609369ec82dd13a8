"""Weights & Biases as a tracker, in threads beside the run, which never waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args
from urllib.parse import urlsplit

import pydantic

from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_summary import RunSummary
from ares_exp.trackers.background_writer import BackgroundWriter
from ares_exp.trackers.tracker import RunInfo, TrackerBase
from ares_exp.trackers.wandb_recording import WandbRecording
from ares_exp.trackers.wandb_service import sweep_run_id

if TYPE_CHECKING:
    from ares_exp.trajectories.records import EpisodeTrajectory

Mode = Literal["auto", "offline", "online", "disabled"]
SERVICE = "https://api.wandb.ai"
MAX_WAITING = 100
"""With so many things waiting for W&B, samples of the runner are dropped, and rows of the table have no trajectory."""

FILES_SHARE = 0.4
"""Share of the bound on `finish` for the table and the artifacts."""

_Seconds = Annotated[float, pydantic.Field(gt=0)]
_Megabytes = Annotated[float, pydantic.Field(ge=0)]


class WandbTracker(TrackerBase):
    """Records a run with Weights & Biases, online or offline: `docs/trackers.md` says what.

    All files stay in the `wandb` folder of the run directory. An offline run is uploaded later, by `wandb sync`, or
    with its inputs by `ares-exp wandb sync <run directory>`. A resumed run continues its W&B run, and a run that the
    agent of a W&B sweep started is the one that the sweep waits for.
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
        log_trajectories: bool = True,
        log_code: bool = False,
        task_set_limit_mb: _Megabytes = 20.0,
        snapshots_limit_mb: _Megabytes = 100.0,
        init_timeout_sec: _Seconds = 10.0,
        finish_timeout_sec: _Seconds = 30.0,
    ) -> None:
        """Keeps the settings; W&B itself is imported by `start`, in the background.

        Args:
            project: W&B project.
            entity: W&B user or team; `None` is the account's default.
            group: W&B group; `None` takes the run's (a sweep is one group).
            job_type: W&B job type; `None` takes the run's: `run`, `replay`, `branch` or `train`.
            name: Display name; `None` takes the run's.
            tags: Labels beside the run's own.
            mode: `auto` obeys the environment variable WANDB_MODE, else is `online` with a key (WANDB_API_KEY, or what
                `wandb login` wrote to the netrc file) or when the agent of a W&B sweep started the run, else `offline`.
            log_artifacts: Whether task set, trajectories and snapshots become artifacts.
            log_trajectories: Whether the table of episodes has a readable page of each trajectory.
            log_code: Whether the source files of this package become an artifact (with `log_artifacts`).
            task_set_limit_mb: Of a larger task set the artifact has the digests alone.
            snapshots_limit_mb: Of a larger snapshot store the artifact has a listing alone.
            init_timeout_sec: Bound on reaching the service, after which the run is recorded offline.
            finish_timeout_sec: Bound on `finish`, uploads included; what is not uploaded by then stays on disk.
        """
        self.project = project
        self.entity = entity
        self.group = group
        self.job_type = job_type
        self.name = name
        self.tags = tags
        self.mode = mode
        self.log_artifacts = log_artifacts
        self.log_trajectories = log_trajectories
        self.log_code = log_code
        self.task_set_limit_mb = task_set_limit_mb
        self.snapshots_limit_mb = snapshots_limit_mb
        self.init_timeout_sec = init_timeout_sec
        self.finish_timeout_sec = finish_timeout_sec
        self._numbers = BackgroundWriter("W&B")
        self._files = BackgroundWriter("W&B's table and artifacts")
        self._recording: WandbRecording | None = None
        self._place: str | None = None

    @property
    def failures(self) -> int:
        """Number of W&B failures so far."""
        return self._numbers.failures + self._files.failures

    @property
    def place(self) -> str | None:
        """URL of the W&B run; of one that is offline, the command that uploads it."""
        return self._place

    def start(self, run: RunInfo) -> None:
        """Starts the tracker. Imports and initialises W&B in the background."""
        mode = effective_mode(self.mode)
        if mode == "disabled":
            return
        recording = WandbRecording(self, run, online=mode == "online", report=self._numbers.report)
        for writer, start in ((self._numbers, recording.start), (self._files, recording.start_files)):
            writer.start()
            writer.do(start)
        self._recording = recording

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Records a finished episode. Returns at once."""
        if (recording := self._recording) is not None:
            shown = trajectory if self._files.waiting < MAX_WAITING else None
            self._numbers.do(lambda: recording.add_episode(result))
            self._files.do(lambda: recording.add_to_table(result, shown))

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Records the load of the runner. Returns at once."""
        if (recording := self._recording) is not None and self._numbers.waiting < MAX_WAITING:
            now = time.time()
            self._numbers.do(lambda: recording.add_system(sample, now))

    def log_training(self, values: Mapping[str, float], *, step: int) -> None:
        """Records numbers of the training. Returns at once."""
        if (recording := self._recording) is not None:
            self._numbers.do(lambda: recording.add_training(values, step))

    def log_order(self, line: Mapping[str, Any]) -> None:
        """Records an order to the run in its config. Returns at once."""
        if (recording := self._recording) is not None and self._numbers.waiting < MAX_WAITING:
            self._numbers.do(lambda: recording.add_order(line))

    def finish(self, summary: RunSummary) -> None:
        """Records the totals and ends the W&B run, within `finish_timeout_sec`. Idempotent."""
        if (recording := self._recording) is None:
            return
        self._recording = None
        deadline = time.monotonic() + self.finish_timeout_sec
        self._numbers.do(lambda: recording.add_totals(summary))
        self._files.do(lambda: recording.end_files(summary))
        self._files.finish(FILES_SHARE * self.finish_timeout_sec)
        self._numbers.do(lambda: recording.end(summary))
        self._numbers.finish(max(deadline - time.monotonic(), 0.0))
        self._place = recording.place


def effective_mode(mode: Mode, environ: Mapping[str, str] = os.environ) -> Mode:
    """Returns the mode, with `auto` resolved: WANDB_MODE, else online with a key or in a W&B sweep, else offline.

    A key is in WANDB_API_KEY, or in the netrc file, where `wandb login` puts it.
    """
    if mode != "auto":
        return mode
    asked = environ.get("WANDB_MODE", "").lower()
    if asked in get_args(Mode) and asked != "auto":
        return cast("Mode", asked)
    has_key = environ.get("WANDB_API_KEY") or sweep_run_id(environ) or _is_logged_in(environ)
    return "online" if has_key else "offline"


def _is_logged_in(environ: Mapping[str, str]) -> bool:
    """Returns whether the netrc file has an entry for the service, as `wandb login` writes it."""
    named, home = environ.get("NETRC"), environ.get("HOME")
    paths = [Path(named)] if named else [Path(home, name) for name in (".netrc", "_netrc")] if home else []
    path = next((path for path in paths if path.is_file()), None)
    host = urlsplit(environ.get("WANDB_BASE_URL") or SERVICE).hostname
    try:
        return path is not None and host in netrc(path).hosts
    except (OSError, ValueError, NetrcParseError):
        return False
