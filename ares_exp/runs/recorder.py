"""The recorder of a run, which writes result rows, response logs and totals, and passes results to the tracker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ares_exp.errors import BudgetExhaustedError, StorageError
from ares_exp.records.results import RESPONSES_USED_UP, EpisodeResult, RunSummary
from ares_exp.records.run_dir import GatheredCalls, RunDir, dump_json
from ares_exp.records.run_storage import RunStorage
from ares_exp.runs.components import Components
from ares_exp.runs.resume.session import PreviousSessions
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import PlannedEpisode
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    from ares_exp.trajectories.response_log import ResponseLog

logger = logging.getLogger(__name__)


class Recorder:
    """Writes the records of a run. The run ends if its disk fails, but not if a tracker or collector fails.

    Attributes:
        results: Results of all sessions, in the order in which they were written.
        failures: Number of failures of trackers, collectors and summary files.
        unwritten_rows: Number of rows that could not be written to `episodes.jsonl`.
    """

    def __init__(
        self,
        parts: Components,
        run_dir: RunDir,
        storage: RunStorage,
        start_log: Callable[[PlannedEpisode], ResponseLog],
    ) -> None:
        self.results: list[EpisodeResult] = []
        self.failures = 0
        self.unwritten_rows = 0
        self._parts = parts
        self._run_dir = run_dir
        self._storage = storage
        self._start_log = start_log
        self._rows = GatheredCalls(self._write)

    def start_tracker(self, info: RunInfo, earlier: PreviousSessions) -> None:
        """Starts the tracker, and passes it the results of earlier sessions.

        Lost episodes of earlier sessions are logged as new results, because the tracker did not get them before.
        """
        lost = {result.episode_id for result in earlier.lost}
        told = tuple(result for result in self.results if result.episode_id not in lost)
        tracker = self._parts.tracker
        self.guard("The tracker's start", lambda: tracker.start(replace(info, earlier=told)))
        for result in earlier.lost:
            self.track(tracker.log_episode, result)

    async def cause(self, failure: BaseException) -> BaseException:
        """Returns the error to report for a failed episode: a failed write of the run's records, or `failure` itself.

        This method first tests whether the disk is writable, because a full disk can make episodes fail with other
        errors.
        """
        if not isinstance(failure, (asyncio.CancelledError, BudgetExhaustedError, StorageError)):
            await asyncio.to_thread(self._storage.probe)
        return self._storage.failure or failure

    async def write(self, episode: RunningEpisode, result: EpisodeResult) -> EpisodeResult:
        """Writes the row of an episode. Returns its result, which is an error if the row cannot be written."""
        self.failures += episode.collector_failures
        await asyncio.shield(self._rows.put((episode, result)))
        assert episode.result is not None
        result = episode.result
        self.results.append(result)
        logger.info("%s: %s, reward %s, %.2f s", result.episode_id, result.outcome, result.reward, result.duration_sec)
        if result.note is not None:
            logger.warning(
                "%s (attempt %d) has reward %s: %s", result.task_name, result.attempt, result.reward, result.note
            )
        return result

    def _write(self, ended: Sequence[tuple[RunningEpisode, EpisodeResult]]) -> None:
        """Writes rows of episodes, then deletes the response logs that are no longer needed.

        If an episode is retried, first creates the response log of its retry. Even if this process dies before the
        retry starts, the resumed run finds this log and starts the retry.
        """
        rows = [dump_json(result.to_dict()) for _, result in ended]
        try:
            for episode, _ in ended:
                if (retry := episode.retry_from_start) is not None:
                    self._start_log(retry)
            self._storage.write(lambda: self._run_dir.append_episodes(*rows), self._run_dir.episodes)
        except StorageError as failure:
            self.unwritten_rows += len(rows)
            for episode, _ in ended:
                episode.result = episode.to_unrecorded(failure)
            return
        for episode, result in ended:
            if episode.log is not None and (episode.retry_from_start or result.outcome in RESPONSES_USED_UP):
                with suppress(OSError):  # resuming the run deletes it
                    episode.log.discard()

    def write_totals(self, summary: RunSummary, warnings: Sequence[str]) -> None:
        """Writes `summary.json` and `results.json`. Blocking."""
        from ares_exp.records.statistics.run_statistics import results_document

        totals = {**summary.to_dict(), "warnings": warnings}
        self.guard("Writing summary.json", lambda: self._run_dir.write_json(self._run_dir.summary, totals))
        results = self._run_dir.results
        self.guard("Writing results.json", lambda: self._run_dir.write_json(results, results_document(summary)))

    async def close(self, summary: RunSummary | None) -> None:
        """Closes the collectors, and passes the totals to the tracker, which has its own time limit for this.

        If the run was not interrupted, also removes the data of deleted snapshots. Without a `summary`, only closes the
        collectors.
        """
        for name, collector in self._parts.collectors.items():
            await asyncio.to_thread(self.guard, f"Closing the {name} collector", collector.close)
        if summary is None:
            return
        if not summary.interrupted:
            await asyncio.to_thread(self.guard, "Collecting deleted snapshots", self._parts.snapshots.collect_garbage)
        tracker = self._parts.tracker
        await asyncio.to_thread(self.guard, "The tracker's end", lambda: tracker.finish(summary))

    def track(self, log: Callable[..., object], *values: object) -> None:
        """Calls a method of the tracker. Logs and counts failures, as `guard` does."""
        self.guard("The tracker", partial(log, *values))

    def guard(self, what: str, act: Callable[[], object]) -> None:
        """Calls `act`. If it fails, logs and counts the failure, and the run continues.

        After a failed write has ended the run, further failures are expected. They are only logged, at the level DEBUG.
        """
        try:
            act()
        except Exception as error:
            if self._storage.failure is not None:
                logger.debug("%s failed", what, exc_info=error)
            else:
                self.failures += 1
                logger.warning("%s failed: %s: %s", what, type(error).__name__, error)
