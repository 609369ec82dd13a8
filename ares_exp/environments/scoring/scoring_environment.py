"""The scoring environment: any environment, whose episodes are scored when they have reached LAST."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ares_exp.cancellation import finish
from ares_exp.environment import EnvironmentWrapper, EpisodeReport, LimitName, MinimalEnvironment, TimeStep
from ares_exp.environments.limited_environment import limited
from ares_exp.environments.phase_clock import PhaseClock
from ares_exp.environments.scoring.scorer import ScoredEpisode
from ares_exp.environments.scoring.scorer_call import ConfiguredScorer
from ares_exp.environments.scoring.scores import combined_reward, named_rewards
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import ScorerError
from ares_exp.records.results import EnvironmentUsage
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import EpisodeCollector


@dataclass(frozen=True, slots=True)
class ScoringRules:
    """The scorers of a run, and what the verifier's reward counts beside them.

    Attributes:
        scorers: In the order in which they are called.
        verifier_weight: Weight of the verifier's reward in the episode's.
    """

    scorers: Sequence[ConfiguredScorer] = ()
    verifier_weight: float = 1.0


class ScoringEnvironment(EnvironmentWrapper):
    """Wraps any environment and has the scorers of a run score each episode that reaches LAST.

    The reward of the LAST step becomes the weighted sum of the verifier's reward and the scores; each number is in
    `report().rewards` by its name. The container is kept until the last scorer has returned. A scorer that fails makes
    the step raise, as a verifier that fails does. An episode that a limit cut short is scored where it is verified.
    """

    def __init__(
        self, env: MinimalEnvironment, rules: ScoringRules, parts: EpisodeParts, *, task_name: str | None = None
    ) -> None:
        """Scores the episodes of `env`.

        Args:
            env: What is played.
            rules: The scorers and their weights.
            parts: What `env` was made from.
            task_name: What scorers are told; by default what `env` reports, or its class.
        """
        self._collected = TrajectoryCollectingEnvironment(
            limited(env, parts.limits),
            EpisodeCollector(),
            episode_id=parts.episode_id,
            task_name=task_name,
            metadata={"attempt": parts.attempt, "seed": parts.seed},
        )
        super().__init__(self._collected)
        self._rules = rules
        self._parts = parts
        self._task_name = task_name
        self._clear()
        self.hold_container()

    def _clear(self) -> None:
        self._last: TimeStep[Any] | None = None
        self._rewards: Mapping[str, float] | None = None
        self._used: EnvironmentUsage | None = None
        self._clock = PhaseClock()

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode."""
        self._clear()
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action`, and has the episode scored at LAST.

        Raises:
            ScorerError: A scorer failed; the message names it. Nothing is left running.
        """
        time_step = await super().step(action)
        return await self._scored(time_step) if time_step.step_type == "LAST" else time_step

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Has the environment end its episode, and the episode scored. Raises `ScorerError` as `step` does."""
        last = await super().truncate(limit)
        return await self._scored(last) if last is not None else None

    async def fork(self, n: int, *, diversify: bool = False) -> Sequence[ScoringEnvironment]:
        """Makes environments that continue from here, each scored by itself."""
        forks = await super().fork(n, diversify=diversify)
        parts = replace(self._parts, episode_id=None)
        return [ScoringEnvironment(fork, self._rules, parts, task_name=self._task_name) for fork in forks]

    def report(self) -> EpisodeReport:
        """The wrapped environment's, with the scores, and what the scorers took and spent."""
        report = super().report()
        if self._last is None and not self._clock.seconds and self._clock.phase is None:
            return report
        used = report.environment_usage
        if self._used is not None:
            used = self._used if used is None else used + self._used
        return replace(
            report,
            rewards=report.rewards if self._rewards is None else self._rewards,
            environment_usage=used,
            phase=self._clock.phase or report.phase,
            phase_sec={**report.phase_sec, **self._clock.seconds},
        )

    @property
    def time_step(self) -> TimeStep[Any] | None:
        """The pending time step; LAST once the episode is scored."""
        pending = super().time_step
        return pending if pending is None or pending.step_type != "LAST" else self._last

    async def _scored(self, last: TimeStep[Any]) -> TimeStep[Any]:
        """Returns the LAST step with the episode's reward, when the scorers have returned."""
        try:
            is_unscored = last.discount and not self._parts.limits.verify_on_truncation
            if is_unscored or not math.isfinite(last.reward or 0.0):  # the latter ends the episode as an error
                self._last = last
            else:
                with self._clock.during("score"):
                    reward = await self._score(last.reward)
                self._last = last._replace(reward=reward)
        finally:
            await finish(self.release_container())
        return self._last

    async def _score(self, reward: float | None) -> float | None:
        episode, container = self._finished(reward), self.held_container
        scores = []
        for one in self._rules.scorers:
            scores.append(await one.score(episode.of_scorer(one.name), container))
        self._rewards = named_rewards(reward, super().report().rewards, scores)
        return combined_reward(reward, self._rules.verifier_weight, scores)

    def _finished(self, reward: float | None) -> ScoredEpisode:
        trajectory = self._collected.trajectory
        if trajectory is None:
            raise ScorerError("Expected the steps of the episode for its scorers, and they could not be collected.")
        report = super().report()
        return ScoredEpisode(
            trajectory=trajectory,
            task=self.current_task,
            reward=reward,
            rewards=named_rewards(reward, report.rewards, ()),
            seed=self._parts.seed,
            attempt=self._parts.attempt,
            output_dir=self._parts.output_dir,
            spend=self._spend,
        )

    def _spend(self, used: EnvironmentUsage) -> None:
        self._used = used if self._used is None else self._used + used
