"""The experiment: plan -> concurrent episodes -> results -> summary."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from ares_exp.budget import BudgetMeter
from ares_exp.components import Components, Settings
from ares_exp.containers.cancellation import finish
from ares_exp.earlier_sessions import EarlierSessions
from ares_exp.episode_plan import PlannedEpisode, episode_seed, plan_episodes
from ares_exp.episode_player import EpisodePlayer
from ares_exp.errors import BudgetExhaustedError, ConfigError, ResumeDivergedError, SnapshotError, UserError
from ares_exp.garbage_collector import collecting_seldom
from ares_exp.llms.response import LLMResponse
from ares_exp.monitoring.runner_monitor import RunnerMonitor
from ares_exp.playing import Playing
from ares_exp.progress import Progress
from ares_exp.results import ANSWERS_USED_UP, UNFINISHED, EpisodeResult
from ares_exp.run_dir import RunDir
from ares_exp.run_summary import RunSummary
from ares_exp.scheduler import Again, Scheduler
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trajectories.sink import knows_handles

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment
    from ares_exp.environments.restoring import Continuation

BUDGET_INTERVAL_SEC = 2.0
"""How often budgets are looked at while nothing is paid for."""

logger = logging.getLogger(__name__)


class Experiment:
    """One run: every selected task, `attempts` times, at most `concurrency` at once.

    Attributes:
        warnings: What the user was warned of.
    """

    def __init__(self, components: Components, settings: Settings, run_dir: RunDir) -> None:
        """Touches nothing yet."""
        self.warnings: list[str] = []
        self._parts = components
        self._settings = settings
        self._run_dir = run_dir
        self._results: list[EpisodeResult] = []
        self._playing: dict[str, Playing] = {}
        self._tries: dict[tuple[str, int], int] = {}
        self._player = EpisodePlayer(components, settings, run_dir, self._pay)
        self._meter = BudgetMeter(components.budget)
        self._scheduler = Scheduler(settings.concurrency, self._play)
        self._interrupted = False
        self._exhausted: BudgetExhaustedError | None = None
        self._max_loop_lag_sec = 0.0
        self._failures = 0
        self._unwritten_rows = 0

    async def prepare(self) -> Sequence[str]:
        """Reads the task set and checks everything that can be checked before the first container starts.

        Returns:
            Names of the selected tasks.

        Raises:
            UserError: Something is wrong, or several things; nothing was started.
        """
        parts = self._parts
        for collector in parts.collectors.values():
            if self._settings.concurrency > 1 and not knows_handles(collector):
                raise ConfigError(
                    f"{type(collector).__name__} records one episode at a time: its `record_step` takes no "
                    "`episode`. Set `concurrency=1`."
                )
        if parts.branching is not None and not getattr(parts.source, "exports_state", False):
            raise ConfigError(
                f"Expected environments that can be branched, and those of {type(parts.source).__name__} have no "
                "`export_state`. Play the task anew, or its recorded answers again with `replay=<run>/<episode>`."
            )
        parts.snapshots.check(parts.source, parts.container_factory)
        names = await asyncio.to_thread(parts.source.load, self._warn)
        checked = [parts.policy, parts.source]
        if getattr(parts.source, "needs_container", True):
            checked = [parts.container_factory, *checked, parts.agent_factory]
        preflights = [check() for part in checked if (check := getattr(part, "preflight", None)) is not None]
        _raise_all(await asyncio.gather(*preflights, return_exceptions=True))
        episode_parts = self._player.episode_parts(self._settings.seed)
        await asyncio.to_thread(parts.source.check, episode_parts, report=self._warn)
        return names

    async def run(
        self,
        task_names: Sequence[str],
        info: RunInfo,
        *,
        earlier: EarlierSessions | None = None,
        redo: Sequence[str] = (),
    ) -> RunSummary:
        """Plays everything that is owed. A bad episode is a result like any other; `interrupt` ends the run early.

        Args:
            task_names: The selected tasks.
            info: What the tracker is told of the run.
            earlier: What earlier sessions of the run have left.
            redo: Outcomes of theirs that are no results.
        """
        began = time.monotonic()
        earlier = earlier or EarlierSessions()
        planned = self._plan(task_names)
        asked = {one.slot for one in planned}
        self._results = [result for result in earlier.results if (result.task_name, result.attempt) in asked]
        for result in self._results:
            if result.reward is None and result.outcome not in UNFINISHED:
                slot = result.task_name, result.attempt
                self._tries[slot] = self._tries.get(slot, 0) + 1
        owed = earlier.owed(planned, run_seed=self._settings.seed, redo=redo)
        self._meter = BudgetMeter(
            self._parts.budget,
            earlier=earlier.results,
            earlier_wall_sec=earlier.wall_sec,
            run_dir=self._run_dir.path,
            sweep_dir=self._settings.sweep_dir,
        )
        self._progress = Progress(len(owed), before=len(planned) - len(owed))
        await asyncio.to_thread(self._refresh_budget)
        self._check_budget()
        self._start_tracker(info, earlier)
        self._progress.start()
        try:
            if owed:
                await self._prepare_branching()
                with collecting_seldom():
                    await self._play_all(owed)
        finally:
            self._progress.stop()
        summary = self._summarise(len(planned), earlier.wall_sec + time.monotonic() - began)
        await asyncio.to_thread(self._write_totals, summary)
        return summary

    def _start_tracker(self, info: RunInfo, earlier: EarlierSessions) -> None:
        """The tracker is told of what was lost as of other tries, and gets the others as what was before."""
        lost = {result.episode_id for result in earlier.lost}
        told = tuple(result for result in self._results if result.episode_id not in lost)
        tracker = self._parts.tracker
        self._guard("The tracker's start", lambda: tracker.start(replace(info, earlier=told)))
        for result in earlier.lost:
            self._guard("The tracker", partial(tracker.log_episode, result))

    def _summarise(self, planned: int, wall_sec: float) -> RunSummary:
        return RunSummary(
            planned=planned,
            results=tuple(self._results),
            interrupted=self._interrupted,
            ended_by=str(self._exhausted) if self._exhausted is not None else None,
            wall_sec=wall_sec,
            recording_failures=self._failures + self._parts.tracker.failures,
            unwritten_rows=self._unwritten_rows,
            snapshot_dir=self._parts.snapshots.output_dir,
            max_loop_lag_sec=self._max_loop_lag_sec,
            threshold=self._settings.reward_threshold,
        )

    def _write_totals(self, summary: RunSummary) -> None:
        """`summary.json` and `results.json`. Blocking."""
        from ares_exp.statistics.results_document import results_document

        totals = {**summary.to_dict(), "warnings": self.warnings}
        self._guard("Writing summary.json", lambda: self._run_dir.write_json(self._run_dir.summary, totals))
        results = self._run_dir.results
        self._guard("Writing results.json", lambda: self._run_dir.write_json(results, results_document(summary)))

    def _plan(self, task_names: Sequence[str]) -> list[PlannedEpisode]:
        """What is owed. A policy that plays recorded episodes gives those the seeds that they had."""
        planned = plan_episodes(task_names, attempts=self._settings.attempts, seed=self._settings.seed)
        if (seed_of := getattr(self._parts.policy, "seed_of", None)) is None:
            return planned
        seeds = [seed_of(one.task_name, one.attempt) for one in planned]
        return [one if seed is None else replace(one, seed=seed) for one, seed in zip(planned, seeds, strict=True)]

    async def close(self, summary: RunSummary | None = None) -> None:
        """Releases all parts; the tracker is told the totals, if any. Bounded by the tracker."""
        parts = self._parts
        closing = {"policy": parts.policy, "environment": parts.source, "container backend": parts.container_factory}
        for what, part in closing.items():
            try:
                if (close := getattr(part, "close", None)) is not None:
                    await close()
            except Exception as error:
                logger.warning("The %s could not be closed: %s: %s", what, type(error).__name__, error)
        for name, collector in self._parts.collectors.items():
            if (end := getattr(collector, "close", None)) is not None:
                await asyncio.to_thread(self._guard, f"Closing the {name} collector", end)
        if summary is not None and not summary.interrupted:
            await asyncio.to_thread(self._guard, "Collecting deleted snapshots", self._parts.snapshots.collect_garbage)
        if summary is not None:
            tracker = self._parts.tracker
            await asyncio.to_thread(self._guard, "The tracker's end", lambda: tracker.finish(summary))

    def interrupt(self) -> None:
        """Ends running episodes as cancelled and starts no more."""
        self._interrupted = True
        self._scheduler.interrupt()

    def request_snapshots(self) -> None:
        """Has a snapshot taken of every running episode, as soon as it waits for the policy."""
        if self._parts.snapshots.output_dir is None:
            logger.warning("This run takes no snapshots: snapshot=manual, and the others but none, let it take them.")
        for playing in self._playing.values():
            if (request := getattr(playing.environment, "request_snapshot", None)) is not None:
                request()

    async def _play_all(self, owed: Sequence[PlannedEpisode]) -> None:
        """Plays what is owed, watched. What does not end in time when it is interrupted gets its row all the same."""
        monitor = RunnerMonitor(
            self._playing.values,
            self._log_system,
            self._warn,
            queued=lambda: self._scheduler.queued,
            interval_sec=self._settings.monitor_interval_sec,
            stall_warn_sec=self._settings.stall_warn_sec,
        )
        try:
            async with monitor:
                watching = asyncio.create_task(self._watch_budget())
                try:
                    await self._scheduler.run(owed)
                finally:
                    watching.cancel()
        finally:
            self._max_loop_lag_sec = monitor.max_loop_lag_sec
        for playing in list(self._playing.values()):
            await self._record(playing, self._exhausted or asyncio.CancelledError("it did not end in time"))

    async def _play(self, planned: PlannedEpisode) -> Again | None:
        """Plays one try of an attempt, and says what follows on it."""
        self._progress.episode_started(planned.task_name)
        playing = self._playing[planned.episode_id] = Playing(planned)
        failure: BaseException | None = None
        try:
            await self._player.play(playing, lambda: finish(self._record(playing, None)))
        except asyncio.CancelledError as cancelled:
            worker = asyncio.current_task()
            if worker is not None and worker.cancelling() and not self._scheduler.interrupted:
                raise  # somebody cancels the run itself
            failure = self._exhausted or cancelled
        except Exception as error:
            logger.info("Episode %s", planned.episode_id, exc_info=error)
            failure = error
        await finish(self._record(playing, failure))
        playing.policy = playing.environment = None  # both know it in turn: without these circles it is freed at once
        return playing.again

    def _next(self, playing: Playing, result: EpisodeResult, failure: BaseException | None) -> Again | None:
        """The try that follows on this one, if one does."""
        planned = playing.planned
        if result.reward is not None or failure is None or self._scheduler.interrupted:
            return None
        retry = planned.retry + 1
        if isinstance(failure, ResumeDivergedError):
            return Again(planned.anew(retry=retry, seed=planned.seed), 0.0)
        if isinstance(failure, SnapshotError) and playing.from_snapshot is not None and planned.earlier is not None:
            self._warn(
                f"An episode could not go on with its snapshot, and is played again from its beginning: {failure}"
            )
            earlier = replace(planned.earlier, episode_id=planned.episode_id)  # whose log has taken its place
            return Again(planned.going_on(earlier, retry=retry, use_snapshots=False), 0.0)
        tries = self._tries[planned.slot] = self._tries.get(planned.slot, 0) + 1
        wait_sec = self._parts.retry.wait_sec(failure, result.outcome, tries)
        if wait_sec is None:
            return None
        seed = episode_seed(self._settings.seed, *planned.slot, retry)
        return Again(planned.anew(retry=retry, seed=seed), wait_sec)

    async def _record(self, playing: Playing, failure: BaseException | None) -> None:
        """Writes the row first, once; whoever fails to record does not end the run."""
        if playing.ended is not None:
            return
        playing.ended = result = playing.result(failure)
        playing.again = self._next(playing, result, failure)
        self._failures += playing.environment.collector_failures if playing.environment is not None else 0
        del self._playing[result.episode_id]
        self._results.append(result)
        logger.info("%s: %s, reward %s, %.2f s", result.episode_id, result.outcome, result.reward, result.duration_sec)
        await asyncio.to_thread(self._write, playing, result)
        self._progress.episode_finished(result)
        if playing.again is not None:
            self._progress.expect_another()
        trajectory = playing.environment.trajectory if playing.environment is not None else None
        self._guard("The tracker", lambda: self._parts.tracker.log_episode(result, trajectory))
        self._meter.add(result)
        self._check_budget()

    def _write(self, playing: Playing, result: EpisodeResult) -> None:
        """The row, after which the log of an attempt with a result is of no more use.

        A try that follows has a log before: it is owed also if this process dies while it waits for its time.
        """
        begins_anew = playing.again is not None and playing.again.planned.earlier is None
        if playing.again is not None and begins_anew:
            self._player.begin_log(playing.again.planned, started_at=0.0)
        row = result.to_dict()
        if not self._guard("Writing the result's row", lambda: self._run_dir.append_episode(row)):
            self._unwritten_rows += 1
        elif playing.log is not None and (begins_anew or result.outcome in ANSWERS_USED_UP):
            playing.log.discard()

    def _pay(self, episode_id: str, answer: LLMResponse) -> None:
        self._meter.add_answer(episode_id, answer)
        if (playing := self._playing.get(episode_id)) is not None:
            used = getattr(playing.environment, "environment_usage", None)
            self._meter.add_environment(episode_id, used)
        self._check_budget()

    def _check_budget(self) -> None:
        """Ends the run when a budget is exhausted: what is under way can be resumed."""
        if self._exhausted is None and (why := self._meter.exhausted()) is not None:
            self._exhausted = BudgetExhaustedError(why)
            self._warn(why)
            self._scheduler.interrupt()

    async def _watch_budget(self) -> None:
        """For what is spent without an answer of this run's: time, and what the other jobs of a sweep spend."""
        while True:
            await asyncio.sleep(BUDGET_INTERVAL_SEC)
            await asyncio.to_thread(self._refresh_budget)
            self._check_budget()

    def _refresh_budget(self) -> None:
        """Looks at the other jobs of the sweep. What cannot be read stays so: that is said once. Blocking."""
        try:
            self._meter.refresh()
        except (ConfigError, OSError) as error:
            self._warn(f"What the jobs of the sweep have spent cannot be read, and does not count: {error}")

    def _log_system(self, sample: Mapping[str, float]) -> None:
        self._guard("The tracker", lambda: self._parts.tracker.log_system(sample))

    async def _prepare_branching(self) -> None:
        """Has the snapshot at hand that the episodes of this run go on from, if they do."""
        branching = self._parts.branching
        if branching is None:
            return

        def make(start_from: Continuation | None, seed: int) -> CodeEnvironment:
            parts = self._player.episode_parts(seed, start_from=start_from)
            return cast("CodeEnvironment", self._parts.source.make(branching.task_name, parts))

        if (check_snapshots := getattr(self._parts.container_factory, "check_snapshots", None)) is not None:
            check_snapshots()  # one may have to be made
        await branching.prepare(make, self._run_dir.branch_point, self._warn)

    def _guard(self, what: str, act: Callable[[], object]) -> bool:
        """Does `act` and says whether it could; a failure is reported and counted, and the run goes on."""
        try:
            act()
        except Exception as error:
            self._failures += 1
            logger.warning("%s failed: %s: %s", what, type(error).__name__, error)
            return False
        return True

    def _warn(self, sentence: str) -> None:
        """Tells the user once, and keeps the sentence for the records."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)
            logger.warning("%s", sentence)


def _raise_all(outcomes: Sequence[object]) -> None:
    """Raises what went wrong: mistakes of the user together, anything else by itself."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in errors:
        if not isinstance(error, UserError):
            raise error
    if errors:
        raise UserError("\n".join(str(error) for error in errors)) if len(errors) > 1 else errors[0]
