"""The experiment, which executes one run: it plans the episodes, runs and records them, and summarizes the results."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from ares_exp.cancellation import finish
from ares_exp.environment import MinimalEnvironment, complete
from ares_exp.errors import (
    BudgetExhaustedError,
    ConfigError,
    HostLostError,
    SnapshotError,
    StorageError,
    UnreachableError,
)
from ares_exp.policies.waiting import Gate
from ares_exp.records.results import RESPONSES_USED_UP, UNFINISHED, EpisodeResult, RunSummary, final_results
from ares_exp.records.run_dir import GatheredCalls, RunDir, dump_json
from ares_exp.records.run_storage import RunStorage
from ares_exp.records.validation import explain_validation
from ares_exp.runs.budget import Spending
from ares_exp.runs.components import (
    Components,
    Settings,
    bounded_concurrency,
    check_collectors,
    close_all,
    planned_episodes,
    prepare,
)
from ares_exp.runs.control.run_control import RunControl
from ares_exp.runs.control.runner_monitor import RunnerMonitor
from ares_exp.runs.control.status import LiveStatus, Progress
from ares_exp.runs.executors.executor import LocalExecutor, Place, make_here
from ares_exp.runs.resume.session import PreviousSessions
from ares_exp.runs.running_episode import ResumableEpisodeMaker, RunningEpisode
from ares_exp.runs.scheduler import Outages, PlannedEpisode, Retry, Scheduler, episode_seed
from ares_exp.runs.trainer import TrainedRun, Trainer, train
from ares_exp.snapshots.schedule import SnapshottingEnvironment
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment
    from ares_exp.environments.restoring import EpisodeStart
    from ares_exp.trajectories.response_log import ResponseLog

LIVE_KEYS = ("concurrency", "budget.…", "retry.…", "policy.max_concurrency", "policy.max_retries")
"""Keys that can be changed while a run is running, because they do not change results."""

GC_THRESHOLD = 25_000
"""Net number of new objects that triggers a garbage collection during a run. Python's default is 700 to 2,000."""

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


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Makes Python's garbage collections, which otherwise take a quarter of the CPU time, rarer in the block."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], GC_THRESHOLD) if before[0] else 0, *before[1:])  # 0: collector disabled
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Experiment:
    """One run, which makes `attempts` attempts at every selected task, with at most `concurrency` episodes at once.

    Attributes:
        warnings: Warnings that were shown to the user so far.
        spending: Count of what the run spends. It ends the run if a budget is exhausted.
    """

    def __init__(self, components: Components, settings: Settings, run_dir: RunDir, *, quiet: bool = False) -> None:
        self.warnings: list[str] = []
        self._parts = components
        self._settings = settings
        self._run_dir = run_dir
        self._quiet = quiet
        self._planned: Sequence[PlannedEpisode] = ()
        self._retry = components.retry
        self._running: dict[str, RunningEpisode] = {}
        self._tries: Counter[tuple[str, int]] = Counter()
        self._losses: Counter[tuple[str, int]] = Counter()
        self._gate = Gate()
        self._storage = RunStorage(run_dir, self._cannot_record)
        self._scheduler = Scheduler(settings.concurrency, self._execute)
        self._outages = Outages(self._scheduler, self._end)
        self._maker = ResumableEpisodeMaker(components, settings, run_dir, self._gate, self._storage, self._outages)
        self._recorder = Recorder(components, run_dir, self._storage, self._maker.start_log)
        self.spending = Spending(
            components, settings, running=lambda: list(self._running.values()), end=self._end, warn=self._warn
        )
        self._live = LiveStatus(lambda: list(self._running.values()), self._scheduler)
        self._trained: TrainedRun | None = None
        self._interrupted = False
        self._loop: asyncio.AbstractEventLoop
        self._ended_by: BudgetExhaustedError | StorageError | UnreachableError | None = None

    async def prepare(self) -> Sequence[str]:
        """Runs all checks that do not need a container. Returns the names of the tasks that the run will use.

        Raises:
            UserError: A check failed. The message lists all problems. No container was started.
        """
        parts = self._parts
        names = await prepare(parts, self._settings, self._maker, self._warn, run_dir=self._run_dir.path)
        self._scheduler.resize(bounded_concurrency(parts, self._settings.concurrency, self._warn))
        if parts.trainer is not None:
            await asyncio.to_thread(parts.trainer.check, parts.policy, names)
        if parts.policy.knows_prices and not self.spending.is_limited:
            self._warn(
                "The run has no limit on costs. Set `budget.cost=20` to end the run at 20 US dollars, or "
                "`limits.cost=0.5` to end an episode at 0.5 US dollars."
            )
        return names

    async def run(
        self,
        task_names: Sequence[str],
        info: RunInfo,
        *,
        earlier: PreviousSessions | None = None,
        redo: Sequence[str] = (),
    ) -> RunSummary:
        """Runs all episodes that still need a result. With a trainer, runs the episodes that the trainer requests.

        `info` is passed to the tracker, and `earlier` contains the results of earlier sessions. Attempts whose outcome
        is in `redo` are run again. If an episode fails, its failure is recorded and the run continues. `interrupt` ends
        the run early.

        Raises:
            ConfigError: The disk has no space for the records. No episode was started.
        """
        started, self._loop = time.monotonic(), asyncio.get_running_loop()
        await asyncio.to_thread(self._storage.open, concurrency=self._settings.concurrency)
        for model in self._parts.source.own_models:
            model.record_in(self._storage)
        earlier = earlier or PreviousSessions()
        trainer = self._parts.trainer
        self._planned = planned = (
            [] if trainer is not None else planned_episodes(self._parts, self._settings, task_names)
        )
        asked = {one.slot for one in planned}
        self._recorder.results = [
            result for result in earlier.results if trainer is not None or (result.task_name, result.attempt) in asked
        ]
        self._tries.update(
            (result.task_name, result.attempt)
            for result in self._recorder.results
            if result.reward is None and result.outcome not in UNFINISHED
        )
        owed = earlier.owed(planned, run_seed=self._settings.seed, redo=redo)
        await asyncio.to_thread(self.spending.start, earlier, self._run_dir.path)
        self._live.planned, self._live.expected = len(planned), len(owed)
        self._live.done_before = len(planned) - len(owed)
        due = {one.slot for one in owed}
        for result in final_results(self._recorder.results):
            if (result.task_name, result.attempt) not in due:
                self._live.add_reward(result)
        self._live.spent, self._live.budget = lambda: self.spending.spent, lambda: self.spending.budget
        self.spending.check()
        self._recorder.start_tracker(info, earlier)
        progress = nullcontext() if self._quiet else Progress(self._live.read, is_kept=self._settings.sweep_dir is None)
        with closing(self._storage), progress:
            if owed or trainer is not None:
                await self._prepare_branching()
                async with self._watched():
                    if trainer is not None:
                        await self._train(trainer, task_names, earlier)
                    else:
                        await self._scheduler.run(owed)
                for episode in list(self._running.values()):
                    await self.record(episode, self._ended_by or asyncio.CancelledError("it did not end in time"))
        summary = self._summarise(self._num_planned(), earlier.wall_sec + time.monotonic() - started)
        await asyncio.to_thread(self._recorder.write_totals, summary, self.warnings)
        return summary

    async def _train(self, trainer: Trainer, task_names: Sequence[str], earlier: PreviousSessions) -> None:
        self._trained = TrainedRun(
            self._parts,
            self._settings,
            self._run_dir,
            self._scheduler,
            task_names,
            earlier,
            self._live.expect_another,
            self._running.values,
            self._gate,
        )
        try:
            await train(trainer, self._trained, self._scheduler)
        except Exception as error:
            if not self._storage.causes(error):  # the trainer could not write its record
                raise

    def _num_planned(self) -> int:
        """Returns the number of attempts that need a reward to make the run complete.

        In a training run, an attempt that the trainer cancelled does not count. An attempt that an earlier session did
        not finish counts only if the trainer requests it again.
        """
        if self._trained is None:
            return len(self._planned)
        final = final_results(self._recorder.results)
        if isinstance(self._ended_by, StorageError | UnreachableError):
            return len(final) + 1  # the training is incomplete, regardless of its requests
        if self._interrupted or self._ended_by is not None:
            return len(final)
        return sum(result.outcome not in UNFINISHED for result in final)

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        monitor = RunnerMonitor(
            self._running.values,
            partial(self._recorder.track, self._parts.tracker.log_system),
            self._warn,
            queued=lambda: self._scheduler.queued,
            figures=self._parts.executor.figures,
        )
        self._live.max_loop_lag_sec = lambda: monitor.max_loop_lag_sec
        control = RunControl(
            run_dir=self._run_dir,
            sweep_dir=self._settings.sweep_dir,
            scheduler=self._scheduler,
            gate=self._gate,
            live=self._live,
            set=self._set,
            interrupt=self.interrupt,
            running=lambda: list(self._running.values()),
            note=partial(self._recorder.track, self._parts.tracker.log_order),
            is_recorded=lambda: self._storage.failure is None,
        )
        with collecting_seldom():
            async with monitor, control.applied():
                watching = asyncio.create_task(self.spending.watch())
                try:
                    yield
                finally:
                    watching.cancel()
                    self._outages.close()
                    self._live.has_ended = True

    def _set(self, values: Mapping[str, Any]) -> None:
        """Changes settings during the run. Raises `ConfigError`, and changes nothing, if a key or value is invalid."""
        try:
            changes = self._changes(values)
        except ValidationError as error:
            raise ConfigError(f"Cannot set {', '.join(values)}: {explain_validation(error)}.") from None
        for change in changes:
            change()

    def _changes(self, values: Mapping[str, Any]) -> list[Callable[[], None]]:
        parts, changes = self._parts, list[Callable[[], None]]()
        groups: dict[str, dict[str, Any]] = {"budget": {}, "retry": {}}
        for key, value in values.items():
            group, _, name = key.partition(".")
            if group in groups and name:
                groups[group][name] = value
            elif group == "policy" and name:
                changes.append(parts.policy.adjust(name, value))
            elif key != "concurrency":
                raise ConfigError(
                    f"`{key}` cannot change during a run. Use one of {', '.join(LIVE_KEYS)}. Other keys "
                    "that do not change results can be set with `resume=`. All others need a new run."
                )
            elif type(value) is not int or value < 1:
                raise ConfigError(f"Expected `concurrency` to be a positive int, got {value!r:.80}.")
            else:
                check_collectors(parts.collectors.values(), value)
                changes.append(partial(self._scheduler.resize, bounded_concurrency(parts, value, self._warn)))
        if groups["budget"]:
            changes.append(partial(self.spending.set, self.spending.budget.changed(groups["budget"])))
        if groups["retry"]:
            changes.append(partial(setattr, self, "_retry", self._retry.changed(groups["retry"])))
        return changes

    def _summarise(self, planned: int, wall_sec: float) -> RunSummary:
        return RunSummary(
            planned=planned,
            results=tuple(self._recorder.results),
            interrupted=self._interrupted,
            ended_by=str(self._ended_by) if self._ended_by is not None else None,
            wall_sec=wall_sec,
            recording_failures=self._recorder.failures + self._parts.tracker.failures,
            unwritten_rows=self._recorder.unwritten_rows,
            snapshot_dir=self._parts.snapshots.output_dir,
            max_loop_lag_sec=self._live.max_loop_lag_sec(),
            threshold=self._settings.reward_threshold,
            must_pass=self._parts.policy.must_pass,
            spenders=tuple(self._parts.source.spenders),
        )

    async def close(self, summary: RunSummary | None = None) -> None:
        """Closes all components of the run. Failures are only logged, so that every component is closed.

        Also passes the summary to the tracker, which has its own time limit for this.
        """
        parts = self._parts
        await close_all(
            {
                "executor": parts.executor.close,
                "policy": parts.policy.close,
                "environment": parts.source.close,
                "container backend": parts.container_factory.close,
            }
        )
        await self._recorder.close(summary)

    def interrupt(self) -> None:
        """Cancels running episodes, and prevents the start of further episodes."""
        self._interrupted = True
        self._scheduler.interrupt()

    def request_snapshots(self) -> None:
        """Requests a snapshot of each running episode, which is taken when the episode next waits for the policy."""
        if self._parts.snapshots.output_dir is None:
            logger.warning("Snapshots are disabled in this run. To take snapshots on request, set snapshot=manual.")
        for episode in self._running.values():
            if isinstance(episode.environment, SnapshottingEnvironment):
                episode.environment.request_snapshot()

    async def _execute(self, planned: PlannedEpisode) -> Retry | None:
        """Runs one episode when the executor has room. Returns a `Retry` if the attempt needs another episode."""
        if self._trained is None:
            return await self._execute_try(planned)
        return await self._trained.execute_try(planned, self._execute_try)

    async def _execute_try(self, planned: PlannedEpisode) -> Retry | None:
        async with self._parts.executor.room(planned.task_name, losses=self._losses[planned.slot]) as place:
            await self._scheduler.starts(planned, self._until_containers_answer)
            episode = self._running[planned.episode_id] = RunningEpisode(
                planned=planned, place=place, recorder=self, limits=planned.limits or self._settings.limits
            )
            failure = await self._maker.run(
                episode,
                is_ended=lambda: self._scheduler.interrupted or planned.slot in self._scheduler.cancelled,
            )
            if isinstance(failure, asyncio.CancelledError):
                failure = self._ended_by or failure
            await self.record(episode, failure)
            if self._trained is not None:
                self._trained.tried(episode)
            return episode.retry

    async def _until_containers_answer(self) -> None:
        if isinstance(self._parts.executor, LocalExecutor) and self._parts.source.needs_container:
            await self._outages.wait(self._parts.container_factory.check_reachable)

    def _next(self, episode: RunningEpisode, result: EpisodeResult, failure: BaseException | None) -> Retry | None:
        planned = episode.planned
        if result.reward is not None or failure is None or self._scheduler.interrupted:
            return None
        retry = planned.retry + 1
        if isinstance(failure, HostLostError):
            self._losses[planned.slot] += 1
            earlier = episode.log.read() if episode.log is not None else planned.earlier
            if earlier is None:
                return Retry(planned.anew(retry=retry, seed=planned.seed), 0.0, is_first=True)
            return Retry(planned.going_on(earlier, retry=retry), 0.0, is_first=True)
        if isinstance(failure, SnapshotError) and episode.from_snapshot is not None and planned.earlier is not None:
            self._warn(f"An episode could not continue from its snapshot, and runs again from its start: {failure}")
            earlier = replace(planned.earlier, episode_id=planned.episode_id)  # its log replaced the earlier one
            return Retry(planned.going_on(earlier, retry=retry, use_snapshots=False), 0.0)
        self._tries[planned.slot] += 1
        wait_sec = self._retry.wait_sec(failure, result.outcome, self._tries[planned.slot])
        if wait_sec is None:
            return None
        seed = episode_seed(self._settings.seed, *planned.slot, retry)
        return Retry(planned.anew(retry=retry, seed=seed), wait_sec)

    async def record(self, episode: RunningEpisode, failure: BaseException | None) -> None:
        """Writes the row of an episode exactly once, even if the caller is cancelled during the call."""
        await finish(self._record(episode, failure))

    async def _record(self, episode: RunningEpisode, failure: BaseException | None) -> None:
        if episode.result is not None:
            return
        if failure is not None:
            failure = await self._recorder.cause(failure)
            if episode.result is not None:  # another call recorded the episode meanwhile
                return
        if episode.is_unkept and self._storage.failure is not None:
            result = episode.to_unrecorded(self._storage.failure)
        else:
            result = episode.to_result(failure)
        episode.result = result
        episode.retry = self._next(episode, result, failure)
        del self._running[result.episode_id]
        result = await self._recorder.write(episode, result)
        self._live.add(result)
        self._live.expected += episode.retry is not None
        self._recorder.track(self._parts.tracker.log_episode, result, episode.trajectory)
        self.spending.add(result)

    def _end(self, why: BudgetExhaustedError | StorageError | UnreachableError) -> None:
        """Cancels running episodes and starts no others, because of the error `why`. Later calls have no effect."""
        if self._ended_by is None:
            self._ended_by = why
            self._warn(str(why))
            self._scheduler.interrupt()

    def is_ended_by(self, error: BaseException) -> bool:
        """Returns whether `error` was caused by a failure to write the run's records. If so, ends the run."""
        return self._storage.causes(error)

    def _cannot_record(self, failure: StorageError) -> None:
        """Ends the run because a record could not be written. Can be called from any thread."""
        with suppress(RuntimeError):  # the loop is closed because the run has ended
            self._loop.call_soon_threadsafe(self._end, failure)

    async def _prepare_branching(self) -> None:
        branching = self._parts.branching
        if branching is None:
            return

        def make(place: Place, start_from: EpisodeStart) -> MinimalEnvironment:
            parts = self._maker.environment_parts(start_from)
            environment = place(self._parts.source, branching.task_name, parts)
            # The scorers are not needed, because this environment never reaches its LAST step.
            return complete(environment).unwrapped

        def check(start_from: EpisodeStart) -> None:
            cast("CodeEnvironment", make(make_here, start_from)).check_start()

        agents = self._parts.effective_agent
        if agents.can_be_restored:
            self._parts.container_factory.check_snapshots()  # a snapshot of the branching point may have to be taken
        async with self._parts.executor.room(branching.task_name) as place:
            store = self._run_dir.branch_point
            await branching.prepare(agents, partial(make, place), check, store, self._warn)

    def _warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)
            logger.warning("%s", sentence)
