"""The tracker that writes metrics to event files for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import pydantic

from ares_exp.errors import ConfigError
from ares_exp.records.results import EpisodeResult, RunSummary
from ares_exp.records.run_dir import RunDir, dump_json
from ares_exp.records.secrets import scrub
from ares_exp.trackers.metrics import EpisodeRows, attempt_values, total_metrics
from ares_exp.trackers.tracker import BackgroundWriter, RunInfo, TrackerBase
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
        self._events: _EventFile | None = None

    @property
    def failures(self) -> int:
        """Number of failed writes so far."""
        return self._writer.failures

    def start(self, run: RunInfo) -> None:
        """Starts a new event file."""
        started = min((result.started_at for result in run.earlier), default=self._clock())
        self._events = _EventFile(RunDir(run.run_dir).tensorboard, started, run.earlier)
        self._writer.start()
        self._write(lambda events, now: events.start(run, now))

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Writes the scalars of a finished episode. Returns immediately."""
        self._write(lambda events, now: events.add_episode(result, now))

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Writes measurements of the run's process. Returns immediately."""
        self._write(lambda events, now: events.add_system(sample, now))

    def finish(self, summary: RunSummary) -> None:
        """Writes the totals and closes the file, within `finish_timeout_sec`. Idempotent."""
        self._write(lambda events, now: events.end(summary, now))
        self._writer.finish(self._finish_timeout_sec)

    def _write(self, act: Callable[[_EventFile, float], object]) -> None:
        """Queues a write. Flushes the file after it, unless another write is waiting."""
        events, now = self._events, self._clock()
        if events is None:
            return

        def write() -> None:
            act(events, now)
            if not self._writer.waiting:
                events.flush()

        self._writer.do(write)


class _EventFile:
    """The event file of one session of a run. Only the background thread may use it, because it is not thread-safe."""

    def __init__(self, folder: Path, started: float, earlier: Sequence[EpisodeResult]) -> None:
        self._folder = folder
        self._started = started
        self._earlier = earlier
        self._rows = EpisodeRows()
        self._file: Any = None

    def start(self, run: RunInfo, now: float) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        # The writer's name has only seconds. The nanoseconds make the names unique and sort the sessions by start.
        self._file = EventsWriter(str(self._folder / "events"), f".{time.time_ns()}")
        for result in self._earlier:
            self._rows.add(result)
        self._earlier = ()
        for tag, content in (("config", run.config), ("provenance", run.provenance)):
            text = f"```json\n{dump_json(scrub(content), indent=2)}\n```"
            self._add(summary.text(tag, text), self._rows.finished, now)

    def add_episode(self, result: EpisodeResult, now: float) -> None:
        self._add_scalars(self._rows.add(result), self._rows.finished, now)

    def add_system(self, sample: Mapping[str, float], now: float) -> None:
        self._add_scalars(sample, max(int(now - self._started), 0), now)

    def end(self, summary: RunSummary, now: float) -> None:
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

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _add_scalars(self, values: Mapping[str, Any], step: int, now: float) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        numbers = {tag: value for tag, value in values.items() if isinstance(value, int | float)}
        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=one) for tag, one in numbers.items()]), step, now)

    def _add(self, summary: Any, step: int, now: float) -> None:
        from tensorboardX.proto.event_pb2 import Event

        if self._file is not None:  # otherwise it could not be opened, which was reported
            self._file.write_event(Event(step=step, wall_time=now, summary=summary))
