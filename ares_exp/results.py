"""Results: how one episode ended, and what a run adds up to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from ares_exp.errors import AgentError, ContainerError, PolicyError, VerifierError


class Outcome(StrEnum):
    """How an episode ended, known where it happened."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABANDONED = "abandoned"
    CLOSED = "closed"
    CANCELLED = "cancelled"
    AGENT_ERROR = "agent_error"
    CONTAINER_ERROR = "container_error"
    VERIFIER_ERROR = "verifier_error"
    POLICY_ERROR = "policy_error"
    ERRORED = "errored"
    LOST = "lost"

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        """The outcome of an episode that `error` ended."""
        classes: tuple[tuple[type[BaseException], Outcome], ...] = (
            (asyncio.CancelledError, cls.CANCELLED),
            (KeyboardInterrupt, cls.CANCELLED),
            (AgentError, cls.AGENT_ERROR),
            (ContainerError, cls.CONTAINER_ERROR),
            (VerifierError, cls.VERIFIER_ERROR),
            (PolicyError, cls.POLICY_ERROR),
        )
        return next((outcome for kind, outcome in classes if isinstance(error, kind)), cls.ERRORED)


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """What went wrong: the exception's class name and text, or the limit that truncated an episode."""

    type: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The record of an exception."""
        return cls(type(error).__name__, str(error) or type(error).__name__)


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One line of `episodes.jsonl`: one finished playing of one task.

    Attributes:
        episode_id: Unique; also names the trajectory file.
        task_name: The task.
        attempt: Number of this playing of the task, from 0.
        seed: Seed of this episode.
        outcome: How it ended.
        reward: The episode's reward; `None` when there is none (never 0.0 for want of a better number).
        rewards: Everything the verifier scored, by key.
        error: What went wrong, or the limit that truncated it.
        num_steps: Policy answers that were applied.
        prompt_tokens, generated_tokens: Token totals over the episode.
        cost: US dollars over the episode.
        started_at, finished_at: Epoch seconds.
        phase_sec: Wall seconds by phase: `start`, `agent`, `policy`, `verify`; and `snapshot`, what the episode waited
            for its snapshots after the policy had answered.
        container_image: What the container's files came from: an image's name, or `"host"`; `None` if it never started.
        snapshots: How many of its snapshots are kept.
        snapshot_failures: How many could not be taken or deleted.
    """

    episode_id: str
    task_name: str
    attempt: int
    seed: int
    outcome: Outcome
    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    error: ErrorInfo | None = None
    num_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    phase_sec: Mapping[str, float] = field(default_factory=dict)
    container_image: str | None = None
    snapshots: int = 0
    snapshot_failures: int = 0

    @property
    def duration_sec(self) -> float:
        """Wall seconds from start to finish."""
        return self.finished_at - self.started_at

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run adds up to.

    Attributes:
        planned: Episodes that were asked for.
        results: Finished episodes, in the order in which they finished.
        interrupted: Whether Ctrl-C or SIGTERM ended the run.
        wall_sec: Wall seconds of the run.
        recording_failures: How many times a row, a trajectory or a metric could not be recorded.
        unwritten_rows: Results of these that are not in `episodes.jsonl`.
        snapshot_dir: The store that snapshots went to; `None` when none were to be taken.
    """

    planned: int
    results: tuple[EpisodeResult, ...]
    interrupted: bool = False
    wall_sec: float = 0.0
    recording_failures: int = 0
    unwritten_rows: int = 0
    snapshot_dir: Path | None = None

    @property
    def scored(self) -> tuple[EpisodeResult, ...]:
        """Episodes that have a reward."""
        return tuple(result for result in self.results if result.reward is not None)

    @property
    def mean_reward(self) -> float | None:
        """Mean over the episodes that have a reward; `None` when there are none."""
        rewards = [result.reward for result in self.scored if result.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def complete(self) -> bool:
        """Whether every episode that was asked for has a reward, and a row."""
        return len(self.scored) == self.planned and not self.unwritten_rows

    def count(self) -> dict[str, int]:
        """Number of episodes by outcome."""
        return count_outcomes(self.results)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form of the totals (the episodes are in `episodes.jsonl`)."""
        return {
            "planned": self.planned,
            "finished": len(self.results),
            "scored": len(self.scored),
            "mean_reward": self.mean_reward,
            "outcomes": self.count(),
            "prompt_tokens": sum(result.prompt_tokens for result in self.results),
            "generated_tokens": sum(result.generated_tokens for result in self.results),
            "cost": sum(result.cost for result in self.results),
            "interrupted": self.interrupted,
            "wall_sec": self.wall_sec,
            "recording_failures": self.recording_failures,
            "unwritten_rows": self.unwritten_rows,
            "snapshots": sum(result.snapshots for result in self.results),
            "snapshot_failures": sum(result.snapshot_failures for result in self.results),
            "snapshot_wait_sec": sum(result.phase_sec.get("snapshot", 0.0) for result in self.results),
        }


def count_outcomes(results: Iterable[EpisodeResult]) -> dict[str, int]:
    """Number of episodes by outcome, outcomes that did not occur left out."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result.outcome.value] = counts.get(result.outcome.value, 0) + 1
    return counts
