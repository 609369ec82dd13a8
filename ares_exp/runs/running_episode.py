"""The state of a running episode, from which its result and its row in `episodes.jsonl` are created."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ares_exp.environment import EnvironmentBase, EpisodeReport, TimeStep
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import StorageError
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.episode_events import EpisodeEvents
from ares_exp.records.results import RESPONSES_USED_UP, EpisodeResult, ErrorInfo, Outcome, Replayed
from ares_exp.records.run_dir import dump_json
from ares_exp.runs.executors.executor import Place, make_here
from ares_exp.runs.resume.resumable_policy import GivenAgain
from ares_exp.runs.scheduler import PlannedEpisode, Retry
from ares_exp.trajectories.recorded_responses import responses
from ares_exp.trajectories.records import EpisodeTrajectory, ending
from ares_exp.trajectories.response_log import ResponseLog

if TYPE_CHECKING:
    from ares_exp.runs.experiment import Experiment


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
