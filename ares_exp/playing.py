"""One episode under way, and the row that it becomes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ares_exp.answer_log import AnswerLog, answers
from ares_exp.environments.environment import Environment
from ares_exp.environments.time_step import TimeStep
from ares_exp.episode_plan import PlannedEpisode
from ares_exp.policies.resumed import ResumablePolicy
from ares_exp.results import ANSWERS_USED_UP, EpisodeResult, ErrorInfo, Outcome, Replayed
from ares_exp.rollout import Tally
from ares_exp.scheduler import Again
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment


@dataclass(slots=True)
class Playing:
    """What is known of an episode so far, whatever ends it.

    Attributes:
        planned: Which episode it is.
        started_at: Epoch seconds.
        tally: What it used, and what it waits for.
        environment: Its environment; `None` until it is made.
        policy: What answers it; `None` until it is made.
        log: What it was answered, on disk; `None` until it is made.
        from_snapshot: How many exchanges of an earlier try the snapshot has that it goes on with.
        ended: The row that it became; `None` until then.
        again: The try that follows on it, if one does.
    """

    planned: PlannedEpisode
    started_at: float = field(default_factory=time.time)
    tally: Tally = field(default_factory=Tally)
    environment: TrajectoryCollectingEnvironment | None = None
    policy: ResumablePolicy | None = None
    log: AnswerLog | None = None
    from_snapshot: int | None = None
    ended: EpisodeResult | None = None
    again: Again | None = None

    def result(self, failure: BaseException | None) -> EpisodeResult:
        """The episode as a row. A LAST step that was reached counts, whatever came after it.

        Args:
            failure: The exception that ended the episode, if one did.
        """
        planned, tally, environment = self.planned, self.tally, self.environment
        last = tally.last or _last_step(environment)
        outcome, error = _ending(last, failure, environment)
        reward = last.reward if last is not None else None
        if reward is not None and not math.isfinite(reward):
            outcome, error = Outcome.ERRORED, ErrorInfo("ValueError", f"the environment's reward is {reward}")
            reward = None
        verdict = getattr(environment, "verdict", None)
        waited = {"rate_limit": tally.waited_sec} if tally.waited_sec else {}
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
            started_at=self.started_at,
            finished_at=time.time(),
            phase_sec={**getattr(environment, "phase_sec", {}), "policy": tally.policy_sec, **waited},
            container_image=getattr(environment, "container_image", None),
            snapshots=len(getattr(environment, "snapshots", ())),
            snapshot_failures=getattr(environment, "snapshot_failures", 0),
            retry=planned.retry,
            replayed=self._replayed(),
            stages=tuple(getattr(environment, "stage_results", ())),
            environment_usage=getattr(environment, "environment_usage", None),
        )

    def note_last(self, last: TimeStep[Any]) -> None:
        """Has the log say what the episode came to, as soon as that is known: its trajectory is still to be ended."""
        self.tally.last = last
        result = self.result(None)
        if self.log is not None and result.outcome in ANSWERS_USED_UP:
            self.log.end(result)

    def grant(self, seconds: float) -> None:
        """Moves the episode's own time limit by what its policy had to wait for the endpoint's rate limit."""
        self.tally.grant(seconds)
        if (grant_time := getattr(self.environment, "grant_time", None)) is not None:
            grant_time(seconds)

    def _replayed(self) -> Replayed | None:
        earlier, policy = self.planned.earlier, self.policy
        if earlier is None:
            return None
        given_again = answers(earlier.exchanges[: self.from_snapshot or 0]) if policy is None else policy.given_again
        return replace(
            Replayed.of(earlier.episode_id, given_again),
            from_snapshot=self.from_snapshot,
            diverged_at=policy.diverged_at if policy is not None else None,
        )


def _ending(
    last: TimeStep[Any] | None, failure: BaseException | None, environment: Environment | None
) -> tuple[Outcome, ErrorInfo | None]:
    if last is None:
        ended = failure or RuntimeError("the episode ended without a LAST step")
        return Outcome.of(ended), ErrorInfo.of(ended)
    if last.discount:
        limit = getattr(environment, "truncated_by", None)
        return Outcome.TRUNCATED, ErrorInfo("limit", f"limit reached: {limit or 'unknown'}")
    return Outcome.COMPLETED, None


def _last_step(environment: Environment | None) -> TimeStep[Any] | None:
    """The LAST step that the environment reached although its caller never got it (it was cancelled meanwhile)."""
    time_step = getattr(environment, "time_step", None)
    return time_step if time_step is not None and time_step.step_type == "LAST" else None
