"""The tracker that writes metrics to a JSON Lines file in the run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic

from ares_exp.records.results import EpisodeResult, RunSummary
from ares_exp.records.run_dir import RunDir, append_text, json_text
from ares_exp.records.secrets import scrub
from ares_exp.trackers.metrics import EpisodeRows, total_metrics
from ares_exp.trackers.tracker import BackgroundWriter, RunInfo, TrackerBase
from ares_exp.trajectories.records import EpisodeTrajectory

_LONGEST_TORN_LINE = 2**24


class JsonlTracker(TrackerBase):
    """Appends a line to `metrics.jsonl` in the run directory for every event.

    Every line has a `kind` and a `time` (epoch seconds). The kinds are:

    - `start`: the run, its config and provenance, written again when the run is resumed
    - `episode`: a finished episode, and the totals so far
    - `system`: measurements of the run's process, such as the number of running episodes
    - `order`: a command that the run received (`ares-exp ctl`)
    - `finish`: the totals of the run

    Written lines survive `kill -9`. Infinite numbers and NaN become `null`.
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
        """
        self._finish_timeout_sec = finish_timeout_sec
        self._clock = clock
        self._writer = BackgroundWriter("tracker=jsonl")
        self._path = Path()
        self._rows = EpisodeRows()

    @property
    def failures(self) -> int:
        """Number of lines that could not be written so far."""
        return self._writer.failures

    def start(self, run: RunInfo) -> None:
        """Appends a line of kind `start` to the file, which may exist from an earlier session. Returns immediately."""
        self._path = path = RunDir(run.run_dir).metrics
        self._rows = EpisodeRows()

        def begin(rows: EpisodeRows) -> Mapping[str, Any]:
            for result in run.earlier:
                rows.add(result)
            return {
                "run_id": run.run_id,
                "name": run.name,
                "resumed": run.resumed,
                "group": run.group,
                "job_type": run.job_type,
                "tags": run.tags,
                "task_set": run.task_set,
                "tasks": run.tasks,
                "parents": run.parents,
                "config": scrub(run.config),
                "provenance": scrub(run.provenance),
            }

        self._writer.start()
        self._writer.do(lambda: _cut_torn_line(path))
        self._append("start", begin)

    def log_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Appends the line of a finished episode. Returns immediately."""
        self._append(
            "episode",
            lambda rows: {
                "episode_id": result.episode_id,
                "task_name": result.task_name,
                "attempt": result.attempt,
                "retry": result.retry,
                "outcome": result.outcome.value,
                **rows.add(result),
            },
        )

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Appends the line of a measurement. Returns immediately."""
        self._append("system", lambda _: sample)

    def log_order(self, line: Mapping[str, Any]) -> None:
        """Appends the line of a control command that the run received. Returns immediately."""
        self._append("order", lambda _: line)

    def finish(self, summary: RunSummary) -> None:
        """Appends the totals and closes the file, within `finish_timeout_sec`. Idempotent."""
        self._append("finish", lambda _: total_metrics(summary))
        self._writer.finish(self._finish_timeout_sec)

    def _append(self, kind: str, make: Callable[[EpisodeRows], Mapping[str, Any]]) -> None:
        # After a timeout of `finish`, the function may be called when the next run has started.
        path, rows, now = self._path, self._rows, self._clock()

        def append() -> None:
            line = {"kind": kind, "time": now, **make(rows)}
            append_text(path, f"{json_text(line)}\n", flags=os.O_CREAT)

        self._writer.do(append)


def _cut_torn_line(path: Path) -> None:
    """Removes an incomplete last line, which a crash during a write can leave."""
    if not path.exists():
        return
    with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _LONGEST_TORN_LINE, 0))
        tail = file.read()
        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
