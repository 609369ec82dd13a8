"""What came of playing recorded episodes again: step by step, in rewards, and as a determinism score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from ares_exp.policies.request_comparison import Match, StepComparison
from ares_exp.results import EpisodeResult, Outcome
from ares_exp.trajectories.records import EpisodeTrajectory

SCHEMA_VERSION = 1
MATCHING = (Match.EXACT, Match.NORMALISED)

ENDED_BY_ITSELF = (Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.AGENT_ERROR, Outcome.VERIFIER_ERROR)
"""How an episode ends that was played as far as its agent went."""


@dataclass(frozen=True, slots=True)
class Score:
    """How many of the steps that were compared match.

    Attributes:
        matching: Steps that are equal, exactly or after normalising.
        compared: These, those that differ, extra ones, and those not reached by an episode that ended by itself (and
            not by a failing container, Ctrl-C, or this policy).
    """

    matching: int = 0
    compared: int = 0

    @property
    def value(self) -> float | None:
        """Their ratio, in [0, 1]; `None` where nothing was compared."""
        return self.matching / self.compared if self.compared else None

    @classmethod
    def total(cls, scores: Iterable[Score]) -> Self:
        """All of them taken together: every step counts the same."""
        every = list(scores)
        return cls(sum(one.matching for one in every), sum(one.compared for one in every))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"score": self.value, "matching_steps": self.matching, "compared_steps": self.compared}


@dataclass(frozen=True, slots=True)
class ReplayedEpisode:
    """One episode: as it was recorded, and as it was played now.

    Attributes:
        task_name, attempt: Which it is now.
        recorded_id, episode_id: The ids of then and now.
        recorded_outcome, outcome: Likewise.
        recorded_reward, reward: Likewise; `None` where there is none.
        steps: Every step of both, compared, in order.
    """

    task_name: str
    attempt: int
    recorded_id: str
    episode_id: str
    recorded_outcome: Outcome
    outcome: Outcome
    recorded_reward: float | None
    reward: float | None
    steps: tuple[StepComparison, ...]

    @classmethod
    def of(cls, recorded: EpisodeTrajectory, result: EpisodeResult, compared: Sequence[StepComparison]) -> Self:
        """Adds to what was compared what the results tell.

        Args:
            recorded: The episode as it was recorded.
            result: What it came to now.
            compared: The steps that were reached now.
        """
        count = sum(step.observation is not None for step in recorded.steps)
        missing = (StepComparison(step, Match.NOT_REACHED) for step in range(len(compared), count))
        return cls(
            task_name=result.task_name,
            attempt=result.attempt,
            recorded_id=recorded.episode_id,
            episode_id=result.episode_id,
            recorded_outcome=recorded.outcome,
            outcome=result.outcome,
            recorded_reward=recorded.total_reward,
            reward=result.reward,
            steps=(*compared, *missing),
        )

    @property
    def score(self) -> Score:
        """Of its steps."""
        matching = self.count(*MATCHING)
        missed = self.count(Match.NOT_REACHED) if self.outcome in ENDED_BY_ITSELF else 0
        return Score(matching, matching + self.count(Match.DIFFERENT, Match.EXTRA) + missed)

    def count(self, *matches: Match) -> int:
        """How many of its steps compare so."""
        return sum(step.match in matches for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "task_name": self.task_name,
            "attempt": self.attempt,
            "episode_id": {"recorded": self.recorded_id, "now": self.episode_id},
            "outcome": {"recorded": self.recorded_outcome.value, "now": self.outcome.value},
            "reward": {"recorded": self.recorded_reward, "now": self.reward},
            **self.score.to_dict(),
            "steps": [step.to_dict() for step in self.steps],
        }


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What came of a run of the replay policy.

    Attributes:
        recording: What was played again.
        normalisers: Names of the normalisers in force, in order.
        episodes: The episodes that were played, in the order in which they ended.
    """

    recording: Path
    normalisers: tuple[str, ...]
    episodes: tuple[ReplayedEpisode, ...]

    @property
    def score(self) -> Score:
        """Of all steps of all episodes."""
        return Score.total(episode.score for episode in self.episodes)

    def by_task(self) -> Mapping[str, Sequence[ReplayedEpisode]]:
        """The episodes of each task, by attempt."""
        tasks: dict[str, list[ReplayedEpisode]] = {}
        for episode in sorted(self.episodes, key=lambda one: (one.task_name, one.attempt)):
            tasks.setdefault(episode.task_name, []).append(episode)
        return tasks

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form: what `replay.json` holds."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recording": str(self.recording),
            "normalisers": list(self.normalisers),
            **self.score.to_dict(),
            "tasks": {name: Score.total(one.score for one in own).to_dict() for name, own in self.by_task().items()},
            "episodes": [episode.to_dict() for own in self.by_task().values() for episode in own],
        }

    def render(self, stream: TextIO) -> None:
        """Writes it for people."""
        from ares_exp.policies.replay_report_text import render

        render(self, stream)
