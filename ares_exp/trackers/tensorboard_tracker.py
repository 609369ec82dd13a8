"""The tracker that writes metrics to event files for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import pydantic

from ares_exp.errors import ConfigError
from ares_exp.records.results import EpisodeResult, RunSummary
from ares_exp.records.run_dir import RunDir, dump_json
from ares_exp.records.secrets import scrub
from ares_exp.trackers.background_writer import BackgroundWriter
from ares_exp.trackers.metrics import EpisodeRows, attempt_values, total_metrics
from ares_exp.trackers.tracker import RunInfo, TrackerBase
from ares_exp.trajectories.records import EpisodeTrajectory

_BINS = 30


class TensorboardTracker(TrackerBase):
    """Writes event files to the folder `tensorboard` of the run directory.

    To view them, run `tensorboard --logdir outputs`.

    For metrics of episodes, the x axis (TensorBoard's step) is the number of finished episodes, including earlier
    sessions of a resumed run. For measurements of the run's process, it is the number of seconds since the start of the
    run. At the end of the run, totals and histograms over the attempts are added. Config and provenance are text
    entries.
    """

    @pydantic.validate_call
    def __init__(
        self,
        *,
        finish_timeout_sec: Annotated[float, pydantic.Field(gt=0)] = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Stores the settings, without writing a file.

        Args:
            finish_timeout_sec: Time limit of `finish` in seconds, in case the disk hangs.
            clock: Function that returns the time in epoch seconds.

        Raises:
            ConfigError: tensorboardX is not installed.
        """
        if find_spec("tensorboardX") is None:
            raise ConfigError(
                "TensorBoard files need the package tensorboardX: `pip install 'ares-exp[tensorboard]'`. Or leave "
                "`tensorboard` out of `tracker=…`."
            )
        self._finish_timeout_sec = finish_timeout_sec
        self._clock = clock
        self._writer = BackgroundWriter("tracker=tensorboard")
        self._rows = EpisodeRows()
        self._started = 0.0
        self._file: Any = None  # only the background thread uses it, because it is not thread-safe

    @property
    def failures(self) -> int:
        """Number of failed writes so far."""
        return self._writer.failures

    def start(self, run: RunInfo) -> None:
        """Starts a new event file."""
        self._started = min((result.started_at for result in run.earlier), default=self._clock())
        self._rows = EpisodeRows(run.earlier)
        self._writer.start()
        self._write(lambda now: self._open(run, now))

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Writes the scalars of a finished episode. Returns immediately."""
        row = self._rows.add(result)
        self._write(partial(self._add_scalars, row, self._rows.finished))

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Writes measurements of the run's process. Returns immediately."""
        self._write(lambda now: self._add_scalars(sample, max(int(now - self._started), 0), now))

    def finish(self, summary: RunSummary) -> None:
        """Writes the totals and closes the file, within `finish_timeout_sec`. Idempotent."""
        self._write(lambda now: self._close(summary, now))
        self._writer.finish(self._finish_timeout_sec)

    def _write(self, act: Callable[[float], object]) -> None:
        """Queues a write. Flushes the file after it, unless another write is waiting."""
        now = self._clock()

        def write() -> None:
            act(now)
            if self._file is not None and not self._writer.waiting:
                self._file.flush()

        self._writer.do(write)

    def _open(self, run: RunInfo, now: float) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter

        folder = RunDir(run.run_dir).tensorboard
        folder.mkdir(parents=True, exist_ok=True)
        # The writer's name has only seconds. The nanoseconds make the names unique and sort the sessions by start.
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        for tag, content in (("config", run.config), ("provenance", run.provenance)):
            text = f"```json\n{dump_json(scrub(content), indent=2)}\n```"
            self._add(summary.text(tag, text), len(run.earlier), now)

    def _close(self, summary: RunSummary, now: float) -> None:
        import numpy as np
        from tensorboardX.summary import histogram

        try:
            self._add_scalars(total_metrics(summary), self._rows.finished, now)
            for name, values in attempt_values(summary).items():
                if values:
                    shown = histogram(f"attempts/{name}", np.array(values, float), bins=_BINS)
                    self._add(shown, self._rows.finished, now)
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _add_scalars(self, values: Mapping[str, Any], step: int, now: float) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        numbers = {tag: value for tag, value in values.items() if isinstance(value, int | float)}
        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=one) for tag, one in numbers.items()]), step, now)

    def _add(self, summary: Any, step: int, now: float) -> None:
        from tensorboardX.proto.event_pb2 import Event

        if self._file is not None:  # otherwise it could not be opened, which was reported
            self._file.write_event(Event(step=step, wall_time=now, summary=summary))
