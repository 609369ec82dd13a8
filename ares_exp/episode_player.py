"""What one episode needs, and how it is played: nothing here knows of other episodes, or of where and when it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp import __version__
from ares_exp.answer_log import AnswerLog, LoggedEpisode, answers
from ares_exp.components import Components, Settings
from ares_exp.containers.cancellation import in_thread
from ares_exp.environments.source import EpisodeParts
from ares_exp.episode_plan import PlannedEpisode
from ares_exp.errors import SnapshotError
from ares_exp.llms.request import LLMClient
from ares_exp.llms.response import LLMResponse
from ares_exp.playing import Playing
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.resumed import ResumablePolicy
from ares_exp.rollout import run_episode
from ares_exp.run_dir import RunDir
from ares_exp.snapshots.nearest import nearest_snapshot
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment

if TYPE_CHECKING:
    from ares_exp.environments.restoring import Continuation

logger = logging.getLogger(__name__)


class EpisodePlayer:
    """Plays planned episodes with the components of a run."""

    def __init__(
        self,
        components: Components,
        settings: Settings,
        run_dir: RunDir,
        paid: Callable[[str, LLMResponse], None] = lambda episode_id, answer: None,
    ) -> None:
        """Touches nothing.

        Args:
            components: What the episodes are made of.
            settings: The experiment's.
            run_dir: Where it writes.
            paid: Is told of every answer that a policy gave, with the id of the episode.
        """
        self._parts = components
        self._paid = paid
        self._settings = settings
        self._run_dir = run_dir

    async def play(self, playing: Playing, at_last: Callable[[], Awaitable[None]]) -> None:
        """Plays the episode, and releases all it used.

        Args:
            playing: Is kept up to date, also when an exception ends the episode.
            at_last: Awaited when it has reached its LAST step.

        Raises:
            EpisodeError, CancelledError: What ended it.
        """
        start_from = None
        if playing.planned.earlier is not None or self._parts.branching is not None:
            start_from = await asyncio.to_thread(self._start, playing)
            await in_thread(lambda: self._take_over(playing.planned))
        playing.environment = environment = self._make_environment(playing, start_from)
        playing.policy = await in_thread(lambda: self._make_policy(playing))
        await run_episode(
            self._parts.wrapper(environment),
            playing.policy,
            playing.tally,
            policy_timeout_sec=self._settings.policy_timeout_sec,
            time_left=lambda: getattr(environment, "time_left_sec", None),
            unanswered=playing.policy.note_unanswered,
            at_last=at_last,
        )

    def episode_parts(
        self, seed: int, *, output_dir: Path | None = None, start_from: Continuation | None = None
    ) -> EpisodeParts:
        """What an environment of this run is made from."""
        return EpisodeParts(
            container_factory=self._parts.container_factory,
            code_agent_factory=self._parts.agent_factory,
            limits=self._settings.limits,
            seed=seed,
            provide_solution=self._parts.policy.needs_solution,
            output_dir=output_dir,
            start_from=start_from,
        )

    def _start(self, playing: Playing) -> Continuation | None:
        """Where the episode goes on, instead of beginning: a snapshot of its earlier try, or where all branch."""
        from ares_exp.environments.episode_facts import EpisodeFacts
        from ares_exp.environments.restoring import Continuation

        planned, branching = playing.planned, self._parts.branching
        start = branching.start(planned.attempt) if branching is not None else None
        if planned.earlier is not None and planned.use_snapshots:
            exchanges, first = planned.earlier.exchanges, branching.step if branching is not None else 0
            store, last = self._run_dir.snapshots, first + len(exchanges)
            try:
                found = nearest_snapshot(store, planned.earlier.episode_id, last)
                unanswered = EpisodeFacts(found).unanswered if found is not None else 0
            except SnapshotError as error:
                logger.warning("Episode %s is played again from its beginning: %s", planned.episode_id, error)
                found = None
            if found is not None:
                if start is not None:
                    unanswered -= EpisodeFacts(start.snapshot).unanswered
                unlogged = max(0, unanswered - sum(exchange.answer is None for exchange in exchanges))  # an old log's
                playing.from_snapshot = max(0, found.step_count - first - unlogged)
                for answer in answers(exchanges[: playing.from_snapshot]):
                    playing.tally.add(answer)
                return Continuation(found)
        return start

    def _take_over(self, planned: PlannedEpisode) -> None:
        """Has the environment told what models of its own said in the earlier try: before the log of that one goes."""
        take_over = getattr(self._parts.source, "take_over", None)
        if planned.earlier is not None and take_over is not None:
            files = self._run_dir.files
            take_over(files / planned.earlier.episode_id, files / planned.episode_id)

    def _make_environment(self, playing: Playing, start_from: Continuation | None) -> TrajectoryCollectingEnvironment:
        planned = playing.planned
        output_dir = self._run_dir.files / planned.episode_id
        parts = self.episode_parts(planned.seed, output_dir=output_dir, start_from=start_from)
        environment = self._parts.source.make(planned.task_name, parts)
        agent = type(self._parts.agent_factory).__name__.removesuffix("Factory")
        metadata = {
            "attempt": planned.attempt,
            "seed": planned.seed,
            **({"agent": agent} if getattr(self._parts.source, "needs_container", True) else {}),
            "policy": type(self._parts.policy).__name__,
            "ares_exp_version": __version__,
            **({"retry": planned.retry} if planned.retry else {}),
            **({"resumed_from": planned.earlier.episode_id} if planned.earlier is not None else {}),
        }
        return TrajectoryCollectingEnvironment(
            self._parts.snapshots.around(environment, episode_id=planned.episode_id),
            self._parts.collectors,
            episode_id=planned.episode_id,
            metadata=metadata,
            at_last=playing.note_last,
        )

    def _make_policy(self, playing: Playing) -> ResumablePolicy:
        planned, earlier = playing.planned, playing.planned.earlier
        spec = EpisodeSpec(planned.task_name, planned.attempt, planned.seed, retry=planned.retry, on_wait=playing.grant)
        playing.log = self.begin_log(planned, started_at=playing.started_at)
        client: LLMClient = self._parts.policy.for_episode(spec)
        if self._parts.branching is not None:
            client = self._parts.branching.policy(client)
        return ResumablePolicy(
            client,
            playing.log,
            earlier=earlier.exchanges if earlier is not None else (),
            begin_at=playing.from_snapshot or 0,
            stage=lambda: len(getattr(playing.environment, "stage_results", ())),
            paid=partial(self._paid, planned.episode_id),
            on_divergence=self._settings.resume_diverged,
        )

    def begin_log(self, planned: PlannedEpisode, *, started_at: float) -> AnswerLog:
        """The log of an episode, which takes the place of that of the try whose answers it takes over. Blocking."""
        earlier = planned.earlier
        begun = LoggedEpisode(
            episode_id=planned.episode_id,
            task_name=planned.task_name,
            attempt=planned.attempt,
            retry=planned.retry,
            seed=planned.seed,
            started_at=started_at,
            parent=earlier.episode_id if earlier is not None else None,
        )
        log = AnswerLog(self._run_dir.answers, begun)
        if log.begin(earlier.exchanges if earlier is not None else ()) and earlier is not None:
            AnswerLog(self._run_dir.answers, earlier).discard()
        return log
