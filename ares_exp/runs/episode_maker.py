"""Creation of one episode's environment and policy, independent of other episodes and of scheduling."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp import __version__
from ares_exp.cancellation import in_thread
from ares_exp.config.parts import name_of
from ares_exp.environment import MinimalEnvironment
from ares_exp.environments.episode_limits import limited
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import PolicyError, SnapshotError
from ares_exp.llms.request import LLMClient
from ares_exp.policies.asked_ahead import BackgroundClient, PaidBackgroundRequests, counted_when_awaited
from ares_exp.policies.policy import Check, EpisodeSpec
from ares_exp.policies.waiting import Gate, reported
from ares_exp.records.environment_responses import copy_responses
from ares_exp.records.run_dir import RunDir
from ares_exp.records.run_storage import RunStorage
from ares_exp.rollout import run_episode
from ares_exp.runs.components import Components, Settings
from ares_exp.runs.outages import Outages
from ares_exp.runs.resume.resumable_policy import ResumablePolicy
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import PlannedEpisode
from ares_exp.trajectories.collecting_environment import EpisodeEnds, TrajectoryCollectingEnvironment
from ares_exp.trajectories.recorded_responses import responses
from ares_exp.trajectories.request_diff import Normaliser, with_own
from ares_exp.trajectories.response_log import LoggedEpisode, ResponseLog

if TYPE_CHECKING:
    from ares_exp.environments.restoring import EpisodeStart

logger = logging.getLogger(__name__)


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
