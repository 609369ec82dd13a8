"""The experiment: plan -> concurrent episodes -> results -> summary."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ares_exp.agents.code_agent import CodeAgentFactory
from ares_exp.containers.container import ContainerFactory
from ares_exp.environments.environment import Environment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EnvironmentSource, EpisodeParts
from ares_exp.episode_plan import PlannedEpisode, plan_episodes
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.progress import Progress
from ares_exp.results import EpisodeResult, ErrorInfo, Outcome, RunSummary
from ares_exp.rollout import Tally, run_episode
from ares_exp.run_dir import RunDir
from ares_exp.trackers.tracker import RunInfo, Tracker
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import TrajectoryCollector

logger = logging.getLogger(__name__)

INTERRUPT_GRACE_SEC = 4.5
"""How long interrupted episodes may take to clean up before the summary is printed without them."""


@dataclass(frozen=True, slots=True)
class Components:
    """One made component for each group."""

    source: EnvironmentSource
    agent_factory: CodeAgentFactory
    container_factory: ContainerFactory
    policy: Policy
    wrapper: Callable[[Environment], Environment]
    collector: TrajectoryCollector
    tracker: Tracker


@dataclass(frozen=True, slots=True)
class Settings:
    """What of the root config the experiment itself needs."""

    attempts: int
    concurrency: int
    seed: int
    limits: EpisodeLimits
    policy_timeout_sec: float | None


class Experiment:
    """One run: every selected task, `attempts` times, at most `concurrency` at once."""

    def __init__(self, components: Components, settings: Settings, run_dir: RunDir) -> None:
        """Touches nothing yet. `warnings` collects what the user was warned of."""
        self.warnings: list[str] = []
        self._parts = components
        self._settings = settings
        self._run_dir = run_dir
        self._results: list[EpisodeResult] = []
        self._workers: list[asyncio.Task[None]] = []
        self._interrupted = False
        self._progress: Progress | None = None

    async def prepare(self) -> Sequence[str]:
        """Reads the task set and checks everything that can be checked before the first container starts.

        Returns:
            Names of the selected tasks.

        Raises:
            UserError: Something is wrong; nothing was started.
        """
        names = self._parts.source.load(self._warn)
        agent_preflight = getattr(self._parts.agent_factory, "preflight", None)
        await asyncio.gather(
            self._parts.container_factory.preflight(),
            self._parts.policy.preflight(),
            *([agent_preflight()] if agent_preflight is not None else []),
        )
        self._parts.source.check(
            self._parts.container_factory, provide_solution=self._needs_solution, report=self._warn
        )
        return names

    async def run(self, task_names: Sequence[str], info: RunInfo) -> RunSummary:
        """Plays everything. A bad episode is a result like any other; `interrupt` ends the run early."""
        began = time.monotonic()
        planned = plan_episodes(task_names, attempts=self._settings.attempts, seed=self._settings.seed)
        self._progress = Progress(len(planned))
        self._parts.tracker.start(info)
        self._progress.start()
        try:
            await self._play_all(deque(planned))
        finally:
            self._progress.stop()
            await self._parts.policy.close()
        summary = RunSummary(len(planned), tuple(self._results), self._interrupted, time.monotonic() - began)
        self._run_dir.write_json(self._run_dir.summary, {**summary.to_dict(), "warnings": self.warnings})
        await asyncio.to_thread(self._parts.tracker.finish, summary)
        return summary

    def interrupt(self) -> None:
        """Ends running episodes as cancelled and starts no more."""
        self._interrupted = True
        for worker in self._workers:
            worker.cancel()

    async def _play_all(self, owed: deque[PlannedEpisode]) -> None:
        count = min(self._settings.concurrency, len(owed))
        self._workers = [asyncio.create_task(self._work(owed)) for _ in range(count)]
        if self._interrupted:  # Ctrl-C came before there was anything to cancel
            self.interrupt()
        try:
            pending: Iterable[asyncio.Task[None]] = self._workers
            while pending and not self._interrupted:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for worker in done:
                    _raise_unless_cancelled(worker)
            if pending:
                await asyncio.wait(pending, timeout=INTERRUPT_GRACE_SEC)
        finally:
            for worker in self._workers:
                worker.cancel()

    async def _work(self, owed: deque[PlannedEpisode]) -> None:
        while owed and not self._interrupted:
            planned = owed.popleft()
            assert self._progress is not None
            self._progress.episode_started(planned.task_name)
            result = await self._play(planned)
            self._results.append(result)
            logger.info(
                "%s: %s, reward %s, %.2f s", result.episode_id, result.outcome.value, result.reward, result.duration_sec
            )
            self._progress.episode_finished(result)
            self._parts.tracker.log_episode(result)
            await asyncio.to_thread(self._run_dir.append_episode, result.to_dict())

    async def _play(self, planned: PlannedEpisode) -> EpisodeResult:
        """Plays one episode; whatever ends it becomes its result."""
        tally, started = Tally(), time.time()
        environment: Environment | None = None
        outcome, reward, error = Outcome.COMPLETED, None, None
        try:
            environment = self._make_environment(planned)
            spec = EpisodeSpec(planned.task_name, planned.attempt, planned.seed)
            policy = self._parts.policy.for_episode(spec)
            last = await run_episode(
                self._parts.wrapper(environment), policy, tally, policy_timeout_sec=self._settings.policy_timeout_sec
            )
            reward = last.reward
            if last.discount:
                limit = getattr(environment, "truncated_by", None)
                outcome, error = Outcome.TRUNCATED, ErrorInfo("limit", f"limit reached: {limit or 'unknown'}")
        except asyncio.CancelledError as cancelled:
            if not self._interrupted:
                raise
            outcome, error = Outcome.CANCELLED, ErrorInfo("CancelledError", str(cancelled) or "the run was interrupted")
        except Exception as failure:
            outcome, error = Outcome.of(failure), ErrorInfo.of(failure)
            logger.info("Episode %s: %s", planned.episode_id, outcome.value, exc_info=failure)
        verdict = getattr(environment, "verdict", None)
        phases: Mapping[str, float] = getattr(environment, "phase_sec", {})
        return EpisodeResult(
            episode_id=planned.episode_id,
            task_name=planned.task_name,
            attempt=planned.attempt,
            seed=planned.seed,
            outcome=outcome,
            reward=reward,
            rewards=dict(verdict.rewards) if verdict is not None else {},
            error=error,
            num_steps=tally.num_steps,
            prompt_tokens=tally.prompt_tokens,
            generated_tokens=tally.generated_tokens,
            cost=tally.cost,
            started_at=started,
            finished_at=time.time(),
            phase_sec={**phases, "policy": tally.policy_sec},
            container_image=getattr(environment, "container_image", None),
        )

    def _make_environment(self, planned: PlannedEpisode) -> Environment:
        parts = EpisodeParts(
            container_factory=self._parts.container_factory,
            code_agent_factory=self._parts.agent_factory,
            limits=self._settings.limits,
            seed=planned.seed,
            provide_solution=self._needs_solution,
            output_dir=self._run_dir.verifier / planned.episode_id,
        )
        return TrajectoryCollectingEnvironment(
            self._parts.source.make(planned.task_name, parts), self._parts.collector, episode_id=planned.episode_id
        )

    @property
    def _needs_solution(self) -> bool:
        return self._parts.policy.needs_solution

    def _warn(self, sentence: str) -> None:
        """Tells the user once, and keeps the sentence for the records."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)
            logger.warning("%s", sentence)


def _raise_unless_cancelled(worker: asyncio.Task[None]) -> None:
    if not worker.cancelled():
        worker.result()
