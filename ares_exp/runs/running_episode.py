"""One episode of a run: the creation of its environment and policy, and its state while it is running.

The result of an episode and its row in `episodes.jsonl` are created from its state.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp import __version__
from ares_exp.cancellation import in_thread
from ares_exp.config.parts import name_of
from ares_exp.environment import EnvironmentBase, EpisodeReport, MinimalEnvironment, TimeStep
from ares_exp.environments.episode_limits import EpisodeLimits, limited
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import PolicyError, SnapshotError, StorageError
from ares_exp.llms.request import LLMClient
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.asked_ahead import BackgroundClient, PaidBackgroundRequests, counted_when_awaited
from ares_exp.policies.episode_events import EpisodeEvents
from ares_exp.policies.policy import Check, EpisodeSpec
from ares_exp.policies.waiting import Gate, reported
from ares_exp.records.environment_responses import copy_responses
from ares_exp.records.results import RESPONSES_USED_UP, EpisodeResult, ErrorInfo, Outcome, Replayed
from ares_exp.records.run_dir import RunDir, dump_json
from ares_exp.records.run_storage import RunStorage
from ares_exp.rollout import run_episode
from ares_exp.runs.components import Components, Settings
from ares_exp.runs.executors.executor import Place, make_here
from ares_exp.runs.resume.resumable_policy import GivenAgain, ResumablePolicy
from ares_exp.runs.scheduler import Outages, PlannedEpisode, Retry
from ares_exp.trajectories.collecting_environment import EpisodeEnds, TrajectoryCollectingEnvironment
from ares_exp.trajectories.recorded_responses import responses
from ares_exp.trajectories.records import EpisodeTrajectory, ending
from ares_exp.trajectories.request_diff import Normaliser, with_own
from ares_exp.trajectories.response_log import LoggedEpisode, ResponseLog

if TYPE_CHECKING:
    from ares_exp.environments.restoring import EpisodeStart
    from ares_exp.runs.experiment import Experiment

logger = logging.getLogger(__name__)


@dataclass
class RunningEpisode(EpisodeEvents):
    """The state of a running episode, which also receives its events, such as waits and the end of the episode.

    The rollout loop, the policy and the collecting wrapper refer to this object. This object does not refer to any of
    them, so that their memory is freed as soon as the episode ends.

    Attributes:
        place: Place of the environment, in this process or on a host.
        recorder: Experiment that records the episode; `None` if the episode is not recorded.
        started_at, finished_at: Times in epoch seconds; `finished_at` is `None` until the episode ends.
        environment: The environment without the wrapper that records it; `None` until it is created.
        given_again: Responses that the policy replayed from an earlier episode; `None` until the policy is created.
        from_snapshot: Number of the earlier episode's exchanges that are part of the restored snapshot; `None` without
            a snapshot.
        trajectory: The trajectory; `None` until the episode ends, or if no collector could record it.
        collector_failures: Number of collector calls that raised an error.
        is_unkept: Whether a collector could not store the end of the trajectory, because its disk failed.
    """

    planned: PlannedEpisode = field(kw_only=True)
    place: Place = field(default=make_here, repr=False)
    recorder: Experiment | None = field(default=None, repr=False)
    limits: EpisodeLimits = field(default_factory=EpisodeLimits, repr=False)
    started_at: float = field(default_factory=time.time)
    finished_at: float | None = None
    environment: EnvironmentBase | None = field(default=None, repr=False)
    log: ResponseLog | None = None
    given_again: GivenAgain | None = None
    from_snapshot: int | None = None
    trajectory: EpisodeTrajectory | None = field(default=None, repr=False)
    collector_failures: int = 0
    is_unkept: bool = False
    result: EpisodeResult | None = None
    retry: Retry | None = None

    def report(self) -> EpisodeReport:
        """Returns the environment's report; an empty report if the environment is not created yet."""
        return self.environment.report() if self.environment is not None else EpisodeReport()

    @property
    def num_stages(self) -> int:
        """The number of finished stages of the task."""
        return self.environment.num_stages if self.environment is not None else 0

    @property
    def retry_from_start(self) -> PlannedEpisode | None:
        """The plan of the retry, if the attempt is retried without replaying responses of this episode."""
        return self.retry.planned if self.retry is not None and self.retry.planned.earlier is None else None

    def waited(self, seconds: float) -> None:
        """Counts a wait of the policy for its endpoint, and extends the episode's time limit by the same time."""
        super().waited(seconds)
        if self.environment is not None:
            self.environment.grant_time(seconds)

    def held(self, seconds: float) -> None:
        """Counts a pause of the run, and extends the episode's time limit by the same time."""
        super().held(seconds)
        if self.environment is not None:
            self.environment.grant_time(seconds)

    def has_room(self, responses: int) -> bool:
        """Returns whether the episode could receive `responses` more responses without reaching one of its limits."""
        return self.limits.reached(replace(self.usage, num_steps=self.usage.num_steps + responses)) is None

    def pay(self, response: LLMResponse) -> None:
        """Counts a response towards the limits of the episode and the budget of the run."""
        self.usage.pay(response)
        if self.recorder is not None:
            self.recorder.spending.pay(self, response)

    def reached_last(self, last: TimeStep[Any], report: EpisodeReport, *, end_time: float) -> None:
        """Writes the episode's result to its response log when the environment has reached its last step.

        The result is then not lost if the process dies before the trajectory and the row are written.
        """
        self.last, self.finished_at = last, end_time
        result = self.to_result(None, report)
        if self.log is not None and result.outcome in RESPONSES_USED_UP:
            with suppress(StorageError):
                self.log.end(dump_json(result.to_dict()))

    def collector_failed(self, error: Exception, *, is_at_end: bool) -> bool:
        """Returns whether a failed disk caused a collector's error. If so, the run ends."""
        if self.recorder is None or not self.recorder.is_ended_by(error):
            return False
        self.is_unkept = self.is_unkept or is_at_end
        return True

    def recorded(self, trajectory: EpisodeTrajectory | None, failures: int, *, end_time: float) -> None:
        """Stores what the collectors recorded: the trajectory, the number of failures and the episode's end time."""
        self.trajectory, self.collector_failures, self.finished_at = trajectory, failures, end_time

    async def ended(self) -> None:
        """Writes the row of the episode. This happens before the container and the agent are released."""
        if self.recorder is not None:
            await self.recorder.record(self, None)

    def to_unrecorded(self, failure: StorageError) -> EpisodeResult:
        """Returns the result of an episode that could not be recorded, so that a resumed run repeats the attempt."""
        result = self.to_result(failure)
        return replace(
            result, outcome=Outcome.of(failure), error=ErrorInfo.of(failure), reward=None, rewards={}, note=None
        )

    def to_result(self, failure: BaseException | None, report: EpisodeReport | None = None) -> EpisodeResult:
        """Returns the episode's result. `failure` is the exception that ended the episode, if any."""
        planned, usage, report = self.planned, self.usage, report or self.report()
        limit, note = report.truncated_by, report.limit_note
        last = self.last
        if last is None and self.environment is not None:  # the caller may have been cancelled after the last step
            shown = self.environment.time_step
            last = shown if shown is not None and shown.step_type == "LAST" else None
        outcome, error, reward = ending(last, failure, limit=limit, note=note)
        waited = {"rate_limit": self.waited_sec, "paused": self.held_sec}
        return EpisodeResult(
            episode_id=planned.episode_id,
            task_name=planned.task_name,
            attempt=planned.attempt,
            seed=planned.seed,
            outcome=outcome,
            reward=reward,
            rewards=report.rewards,
            note=report.note,
            error=error,
            num_steps=usage.step_count,
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.generated_tokens,
            cost=usage.cost,
            started_at=self.started_at,
            finished_at=time.time() if self.finished_at is None else self.finished_at,
            phase_sec={
                **report.phase_sec,
                "policy": self.policy_sec,
                **{phase: sec for phase, sec in waited.items() if sec},
            },
            container_image=report.container_image,
            snapshots=len(report.snapshots),
            snapshot_failures=report.snapshot_failures,
            retry=planned.retry,
            replayed=self._replayed(),
            stages=report.stages,
            environment_usage=report.environment_usage,
            length_stops=usage.length_stops,
            format_errors=report.format_errors,
            agent=report.agent_facts,
        )

    def _replayed(self) -> Replayed | None:
        earlier = self.planned.earlier
        if earlier is None:
            return None
        given = self.given_again or GivenAgain(responses(earlier.exchanges[: self.from_snapshot or 0]))
        replayed = Replayed.of(earlier.episode_id, given.responses)
        return replace(replayed, from_snapshot=self.from_snapshot, diverged_at=given.diverged_at)


class EpisodeMaker:
    """Creates and runs episodes from the components of a run.

    It does not log responses, so its episodes cannot be resumed. Only collectors write to the disk.
    """

    def __init__(
        self, components: Components, settings: Settings, gate: Gate | None = None, outages: Outages | None = None
    ) -> None:
        self._parts = components
        self._settings = settings
        self._gate = gate or Gate()
        self._outages = outages
        self._ends = EpisodeEnds()

    async def make(self, episode: RunningEpisode) -> tuple[MinimalEnvironment, LLMClient]:
        """Creates an episode's environment and policy without starting them. The caller must close both.

        Raises:
            EpisodeError: The environment or the policy cannot be created.
        """
        background_client = self._background_client()
        environment = self._make_environment(episode, background_client=background_client)
        client = self._make_client(episode)
        if background_client is not None:
            client = PaidBackgroundRequests(client, episode.pay)
            background_client.answered_by(client.respond_in_background)
        return self._parts.wrapper(environment), client

    async def run(
        self, episode: RunningEpisode, *, is_ended: Callable[[], bool] = lambda: False
    ) -> BaseException | None:
        """Runs an episode, and returns the exception that ended it; `None` if it ended normally.

        If the asyncio task is cancelled, calls `is_ended`. If the result is true, only this episode was cancelled, and
        the `CancelledError` is returned like any other exception.

        Raises:
            CancelledError: The asyncio task was cancelled, and `is_ended` returned false.
        """
        try:
            environment, policy = await self.make(episode)
            await run_episode(environment, policy, episode, policy_timeout_sec=self._settings.policy_timeout_sec)
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is not None and task.cancelling() and not is_ended():
                raise
            return cancelled
        except Exception as error:
            logger.info("Episode %s", episode.planned.episode_id, exc_info=error)
            return error
        return None

    def environment_parts(self, start_from: EpisodeStart | None = None) -> EpisodeParts:
        """Returns the factories, limits and other arguments from which all environments of this run are created.

        `start_from` is the starting point of the environments; `None` for the beginning of the task.
        """
        return EpisodeParts(
            container_factory=self._parts.container_factory,
            code_agent_factory=self._parts.effective_agent,
            limits=self._settings.limits,
            seed=self._settings.seed,
            provide_solution=self._parts.policy.needs_solution,
            start_from=start_from,
        )

    def _background_client(self) -> BackgroundClient | None:
        is_asked = self._parts.source.needs_container and self._parts.effective_agent.responds_in_background
        return BackgroundClient(self._settings.policy_timeout_sec) if is_asked else None

    def _make_environment(
        self,
        episode: RunningEpisode,
        start_from: EpisodeStart | None = None,
        *,
        output_dir: Path | None = None,
        background_client: BackgroundClient | None = None,
    ) -> TrajectoryCollectingEnvironment:
        planned = episode.planned
        parts = replace(
            self.environment_parts(start_from),
            limits=episode.limits,
            seed=planned.seed,
            output_dir=output_dir,
            episode_id=planned.episode_id,
            attempt=planned.attempt,
            background_client=background_client,
        )
        made = episode.place(self._parts.source, planned.task_name, parts)
        environment = limited(made, parts.limits, episode.usage)
        metadata = {
            "attempt": planned.attempt,
            "seed": planned.seed,
            **({"agent": self._parts.effective_agent.name} if self._parts.source.needs_container else {}),
            "policy": name_of(self._parts.policy),
            **({"model": str(model)} if (model := self._parts.policy.model_name) is not None else {}),
            "ares_exp_version": __version__,
            **({"retry": planned.retry} if planned.retry else {}),
            **({"resumed_from": planned.earlier.episode_id} if planned.earlier is not None else {}),
        }
        episode.environment = self._parts.snapshots.around(environment, episode_id=planned.episode_id)
        return TrajectoryCollectingEnvironment(
            episode.environment,
            self._parts.collectors,
            episode_id=planned.episode_id,
            task_name=planned.task_name,
            start_time=episode.started_at,
            metadata=metadata,
            listener=episode,
            ends=self._ends,
        )

    def _make_client(self, episode: RunningEpisode) -> LLMClient:
        planned = episode.planned
        spec = EpisodeSpec(
            planned.task_name,
            planned.attempt,
            planned.seed,
            retry=planned.retry,
            on_wait=counted_when_awaited(episode.waited),
            may_ask=self._may_ask(episode),
            until_reachable=self._until_reachable(episode),
            normalisers=self._parts.effective_agent.normalisers,
        )
        if (branching := self._parts.branching) is not None:
            return branching.policy(self._parts.policy, spec)
        return self._parts.policy.for_episode(spec)

    def _may_ask(self, episode: RunningEpisode) -> Callable[[], Awaitable[None]]:
        on_wait = counted_when_awaited(episode.held)
        return lambda: self._gate.passed(on_wait)

    def _until_reachable(self, episode: RunningEpisode) -> Callable[[PolicyError, Check], Awaitable[bool]] | None:
        outages, on_wait = self._outages, counted_when_awaited(episode.waited)
        if outages is None:
            return None

        async def until_reachable(error: PolicyError, check: Check) -> bool:
            episode.unreachable = error
            with reported(on_wait):
                was_away = await outages.wait(check)
            episode.unreachable = None
            return was_away

        return until_reachable


class ResumableEpisodeMaker(EpisodeMaker):
    """Creates and runs the episodes of a run that can be resumed.

    The response log of each episode contains the policy's responses, so that a later session can replay them.
    """

    def __init__(
        self,
        components: Components,
        settings: Settings,
        run_dir: RunDir,
        gate: Gate,
        storage: RunStorage,
        outages: Outages,
    ) -> None:
        super().__init__(components, settings, gate, outages)
        self._run_dir = run_dir
        self._storage = storage

    async def make(self, episode: RunningEpisode) -> tuple[MinimalEnvironment, ResumablePolicy]:
        """Creates the environment of an episode, and a policy that replays logged responses and logs all new ones."""
        start_from = None
        if episode.planned.earlier is not None or self._parts.branching is not None:
            start_from = await asyncio.to_thread(self._start, episode)
        files = self._run_dir.files / episode.planned.episode_id
        await self._take_over_responses(episode.planned, files)
        background_client = self._background_client()
        environment = self._make_environment(episode, start_from, output_dir=files, background_client=background_client)
        if episode.planned.earlier is None:  # creating a log only writes one line
            policy = self._make_policy(episode)
        else:
            policy = await in_thread(lambda: self._make_policy(episode))
        if background_client is not None:
            background_client.answered_by(policy.respond_in_background)
        return self._parts.wrapper(environment), policy

    async def _take_over_responses(self, planned: PlannedEpisode, own: Path) -> None:
        """Copies recorded responses of the environment's own models, such as judges, from an earlier episode.

        If this episode continues an earlier one, copies all responses. In a replay, copies only the scorers' responses.
        """
        recorded = self._parts.policy.recorded_files(planned.task_name, planned.attempt)
        if (earlier := planned.earlier) is not None:  # copied before the earlier log is deleted
            await in_thread(lambda: copy_responses(self._run_dir.files / earlier.episode_id, own))
        elif recorded is not None:
            await in_thread(lambda: copy_responses(recorded, own, of_scorers=True))

    def _start(self, episode: RunningEpisode) -> EpisodeStart | None:
        """Returns a snapshot of the earlier episode or, without one, the branching point; `None` to start normally."""
        from ares_exp.environments.restoring import Continuation
        from ares_exp.snapshots.store import SnapshotStore

        planned, branching = episode.planned, self._parts.branching
        start = branching.start(planned.attempt) if branching is not None else None
        if planned.earlier is not None and planned.use_snapshots:
            exchanges, first = planned.earlier.exchanges, branching.step if branching is not None else 0
            store, last = self._run_dir.snapshots, first + len(exchanges)
            try:
                found = SnapshotStore(store).nearest(planned.earlier.episode_id, last)
            except SnapshotError as error:
                logger.warning("Restarting episode %s from the beginning: %s", planned.episode_id, error)
                found = None
            if found is not None:
                episode.from_snapshot = max(0, found.step_count - first)
                for response in responses(exchanges[: episode.from_snapshot]):
                    episode.usage.add(response)
                return Continuation(found)
        return start

    def _make_policy(self, episode: RunningEpisode) -> ResumablePolicy:
        planned, earlier = episode.planned, episode.planned.earlier
        episode.log = self.start_log(planned, started_at=episode.started_at)
        policy = ResumablePolicy(
            self._make_client(episode),
            episode.log,
            earlier=earlier.exchanges if earlier is not None else (),
            ahead=earlier.ahead if earlier is not None else (),
            start_at=episode.from_snapshot or 0,
            events=episode,
            may_ask=self._may_ask(episode),
            normalisers=self._normalisers,
        )
        episode.given_again = policy.given_again
        return policy

    def _may_ask(self, episode: RunningEpisode) -> Callable[[], Awaitable[None]]:
        passed = super()._may_ask(episode)

        async def may_ask() -> None:
            await passed()
            assert episode.log is not None
            episode.log.check()

        return may_ask

    @functools.cached_property
    def _normalisers(self) -> Sequence[Normaliser]:
        return with_own(self._parts.effective_agent.normalisers)

    def start_log(self, planned: PlannedEpisode, *, started_at: float = 0.0) -> ResponseLog:
        """Creates the response log of an episode. Blocking.

        If this episode continues an earlier one, the earlier responses are copied to the new log, and the earlier log
        is deleted.

        Raises:
            StorageError: The new log could not be written. The log of the earlier episode is kept.
        """
        earlier = planned.earlier
        started = LoggedEpisode(
            episode_id=planned.episode_id,
            task_name=planned.task_name,
            attempt=planned.attempt,
            retry=planned.retry,
            seed=planned.seed,
            started_at=started_at,
            parent=earlier.episode_id if earlier is not None else None,
        )
        log = ResponseLog(self._run_dir.responses, started, self._storage)
        if earlier is None:
            log.start(())
        else:
            log.start(earlier.exchanges, earlier.ahead)
            ResponseLog(self._run_dir.responses, earlier, self._storage).discard()
        return log
