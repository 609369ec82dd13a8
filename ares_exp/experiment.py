"""The experiment: plan -> concurrent episodes -> results -> summary."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ares_exp import __version__
from ares_exp.agents.code_agent import CodeAgentFactory
from ares_exp.branching import Branching
from ares_exp.containers.cancellation import finish
from ares_exp.containers.container import ContainerFactory
from ares_exp.environments.environment import Environment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EnvironmentSource, EpisodeParts
from ares_exp.episode_plan import PlannedEpisode, plan_episodes
from ares_exp.errors import ConfigError, UserError
from ares_exp.llms.request import LLMClient
from ares_exp.playing import Playing
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.progress import Progress
from ares_exp.results import EpisodeResult, RunSummary
from ares_exp.rollout import run_episode
from ares_exp.run_dir import RunDir
from ares_exp.snapshots.schedule import NoSnapshots, SnapshotSchedule
from ares_exp.trackers.tracker import RunInfo, Tracker
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.sink import knows_handles

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment
    from ares_exp.environments.restoring import Continuation

logger = logging.getLogger(__name__)

INTERRUPT_GRACE_SEC = 4.5
"""How long interrupted episodes may take to clean up before the run ends without them."""


@dataclass(frozen=True, slots=True)
class Components:
    """One made component for each group."""

    source: EnvironmentSource
    agent_factory: CodeAgentFactory
    container_factory: ContainerFactory
    policy: Policy
    wrapper: Callable[[Environment], Environment]
    collectors: Mapping[str, TrajectoryCollector]
    tracker: Tracker
    snapshots: SnapshotSchedule | NoSnapshots = field(default_factory=NoSnapshots)
    branching: Branching | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What of the root config the experiment itself needs."""

    attempts: int
    concurrency: int
    seed: int
    limits: EpisodeLimits
    policy_timeout_sec: float | None


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
        self._workers: list[asyncio.Task[None]] = []
        self._interrupt = asyncio.Event()
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
        parts.snapshots.check(parts.source, parts.container_factory)
        names = await asyncio.to_thread(parts.source.load, self._warn)
        checks = [parts.container_factory.preflight(), parts.policy.preflight()]
        if (agent_preflight := getattr(parts.agent_factory, "preflight", None)) is not None:
            checks.append(agent_preflight())
        _raise_all(await asyncio.gather(*checks, return_exceptions=True))
        await asyncio.to_thread(
            parts.source.check,
            parts.container_factory,
            provide_solution=parts.policy.needs_solution,
            report=self._warn,
        )
        return names

    async def run(self, task_names: Sequence[str], info: RunInfo) -> RunSummary:
        """Plays everything. A bad episode is a result like any other; `interrupt` ends the run early."""
        began = time.monotonic()
        planned = self._plan(task_names)
        self._progress = Progress(len(planned))
        self._guard("The tracker's start", lambda: self._parts.tracker.start(info))
        self._progress.start()
        try:
            await self._prepare_branching()
            await self._play_all(deque(planned))
        finally:
            self._progress.stop()
        summary = RunSummary(
            planned=len(planned),
            results=tuple(self._results),
            interrupted=self._interrupt.is_set(),
            wall_sec=time.monotonic() - began,
            recording_failures=self._failures + self._parts.tracker.failures,
            unwritten_rows=self._unwritten_rows,
            snapshot_dir=self._parts.snapshots.output_dir,
        )
        totals = {**summary.to_dict(), "warnings": self.warnings}
        self._guard("Writing summary.json", lambda: self._run_dir.write_json(self._run_dir.summary, totals))
        return summary

    def _plan(self, task_names: Sequence[str]) -> list[PlannedEpisode]:
        """What is owed. A policy that plays recorded episodes gives those the seeds that they had."""
        planned = plan_episodes(task_names, attempts=self._settings.attempts, seed=self._settings.seed)
        if (seed_of := getattr(self._parts.policy, "seed_of", None)) is None:
            return planned
        seeds = [seed_of(one.task_name, one.attempt) for one in planned]
        return [one if seed is None else replace(one, seed=seed) for one, seed in zip(planned, seeds, strict=True)]

    async def close(self, summary: RunSummary | None = None) -> None:
        """Releases policy, containers and tracker; the tracker is told the totals, if any. Bounded by the tracker."""
        for what, part in (("policy", self._parts.policy), ("container backend", self._parts.container_factory)):
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
        self._interrupt.set()
        for worker in self._workers:
            worker.cancel()

    def request_snapshots(self) -> None:
        """Has a snapshot taken of every running episode, as soon as it waits for the policy."""
        if self._parts.snapshots.output_dir is None:
            logger.warning("This run takes no snapshots: snapshot=manual, and the others but none, let it take them.")
        for playing in self._playing.values():
            if (request := getattr(playing.environment, "request_snapshot", None)) is not None:
                request()

    async def _play_all(self, owed: deque[PlannedEpisode]) -> None:
        """Keeps `concurrency` workers busy until nothing is owed, or until the interrupt and its grace are over."""
        if self._interrupt.is_set():
            return
        count = min(self._settings.concurrency, len(owed))
        self._workers = [asyncio.create_task(self._work(owed)) for _ in range(count)]
        interrupt = asyncio.create_task(self._interrupt.wait())
        pending: set[asyncio.Task[Any]] = {*self._workers}
        try:
            while pending and not self._interrupt.is_set():
                done, _ = await asyncio.wait({*pending, interrupt}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                for worker in done - {interrupt}:
                    if not (worker.cancelled() and self._interrupt.is_set()):  # that is how the interrupt ends them
                        worker.result()
            if pending:
                await asyncio.wait(pending, timeout=INTERRUPT_GRACE_SEC)
            for playing in list(self._playing.values()):  # what did not end in time: its row says so
                await self._record(playing, asyncio.CancelledError("it did not end in time"))
        finally:
            interrupt.cancel()
            for worker in self._workers:
                worker.cancel()

    async def _work(self, owed: deque[PlannedEpisode]) -> None:
        while owed and not self._interrupt.is_set():
            planned = owed.popleft()
            self._progress.episode_started(planned.task_name)
            playing = self._playing[planned.episode_id] = Playing(planned, time.time())
            failure = await self._play(playing)
            if planned.episode_id in self._playing:
                await finish(self._record(playing, failure))

    async def _play(self, playing: Playing) -> BaseException | None:
        """Plays one episode; returns what ended it, if that was an exception."""
        planned = playing.planned
        try:
            playing.environment = environment = self._make_environment(planned)
            spec = EpisodeSpec(planned.task_name, planned.attempt, planned.seed)
            await run_episode(
                self._parts.wrapper(environment),
                self._policy_for(spec),
                playing.tally,
                policy_timeout_sec=self._settings.policy_timeout_sec,
                time_left=lambda: getattr(environment, "time_left_sec", None),
            )
        except asyncio.CancelledError as cancelled:
            worker = asyncio.current_task()
            if worker is not None and worker.cancelling() and not self._interrupt.is_set():
                raise  # somebody cancels the run itself
            return cancelled
        except Exception as failure:
            logger.info("Episode %s", planned.episode_id, exc_info=failure)
            return failure
        return None

    async def _record(self, playing: Playing, failure: BaseException | None) -> None:
        """Writes the row first; whoever fails to record does not end the run."""
        result = playing.result(failure)
        self._failures += playing.environment.collector_failures if playing.environment is not None else 0
        del self._playing[result.episode_id]
        self._results.append(result)
        logger.info("%s: %s, reward %s, %.2f s", result.episode_id, result.outcome, result.reward, result.duration_sec)
        row = result.to_dict()
        if not await asyncio.to_thread(
            self._guard, "Writing the result's row", lambda: self._run_dir.append_episode(row)
        ):
            self._unwritten_rows += 1
        self._progress.episode_finished(result)
        self._guard("The tracker", lambda: self._parts.tracker.log_episode(result))

    def _policy_for(self, spec: EpisodeSpec) -> LLMClient:
        client = self._parts.policy.for_episode(spec)
        return client if self._parts.branching is None else self._parts.branching.policy(client)

    def _episode_parts(
        self, seed: int, *, output_dir: Path | None = None, start_from: Continuation | None = None
    ) -> EpisodeParts:
        return EpisodeParts(
            container_factory=self._parts.container_factory,
            code_agent_factory=self._parts.agent_factory,
            limits=self._settings.limits,
            seed=seed,
            provide_solution=self._parts.policy.needs_solution,
            output_dir=output_dir,
            start_from=start_from,
        )

    async def _prepare_branching(self) -> None:
        """Has the snapshot at hand that the episodes of this run go on from, if they do."""
        branching = self._parts.branching
        if branching is None:
            return

        def make(start_from: Continuation | None, seed: int) -> CodeEnvironment:
            parts = self._episode_parts(seed, start_from=start_from)
            return cast("CodeEnvironment", self._parts.source.make(branching.task_name, parts))

        await branching.prepare(make, self._run_dir.branch_point, self._warn)

    def _make_environment(self, planned: PlannedEpisode) -> TrajectoryCollectingEnvironment:
        parts = self._episode_parts(
            planned.seed,
            output_dir=self._run_dir.verifier / planned.episode_id,
            start_from=self._parts.branching.start(planned.attempt) if self._parts.branching is not None else None,
        )
        environment = self._parts.source.make(planned.task_name, parts)
        metadata = {
            "attempt": planned.attempt,
            "seed": planned.seed,
            "agent": type(self._parts.agent_factory).__name__.removesuffix("Factory"),
            "policy": type(self._parts.policy).__name__,
            "ares_exp_version": __version__,
        }
        return TrajectoryCollectingEnvironment(
            self._parts.snapshots.around(environment, episode_id=planned.episode_id),
            self._parts.collectors,
            episode_id=planned.episode_id,
            metadata=metadata,
        )

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
