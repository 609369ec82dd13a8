"""Totals of a run: outcomes, rewards, tokens, cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.records import exit_codes
from ares_exp.records.results import UNFINISHED, EnvironmentUsage, EpisodeResult, count_outcomes, final_results


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Totals of a run.

    Attributes:
        planned: Number of planned attempts.
        results: Finished episodes, in the order in which they finished: every try of every attempt.
        interrupted: Whether Ctrl-C or SIGTERM ended the run.
        ended_by: The used-up budget or the failed write that ended the run, in words; otherwise `None`.
        wall_sec: Wall seconds of the run, all its sessions taken together.
        recording_failures: How many times a row, a trajectory or a metric could not be recorded.
        unwritten_rows: Number of these results that are missing in `episodes.jsonl`.
        snapshot_dir: The store of the run's snapshots; `None` when none were to be taken.
        max_loop_lag_sec: The longest time for which the event loop was held up.
        threshold: The reward from which on an attempt has passed.
        must_pass: Whether an attempt that has not passed means that something is broken: the tasks' own solutions were
            run.
        spenders: What made the model calls of `environment_usage`, in words; empty where that is not known.
    """

    planned: int
    results: tuple[EpisodeResult, ...] = field(repr=False)  # of a large run that would take seconds
    interrupted: bool = False
    ended_by: str | None = None
    wall_sec: float = 0.0
    recording_failures: int = 0
    unwritten_rows: int = 0
    snapshot_dir: Path | None = None
    max_loop_lag_sec: float = 0.0
    threshold: float = 1.0
    must_pass: bool = False
    spenders: tuple[str, ...] = ()

    @property
    def final(self) -> tuple[EpisodeResult, ...]:
        """The last try of every attempt."""
        return final_results(self.results)

    @property
    def finished(self) -> tuple[EpisodeResult, ...]:
        """Attempts that have a result, be it an error."""
        return tuple(result for result in self.final if result.outcome not in UNFINISHED)

    @property
    def scored(self) -> tuple[EpisodeResult, ...]:
        """Attempts that have a reward."""
        return tuple(result for result in self.final if result.reward is not None)

    @property
    def mean_reward(self) -> float | None:
        """Mean over the attempts that have a reward; `None` when there are none."""
        rewards = [result.reward for result in self.scored if result.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def broken(self) -> tuple[EpisodeResult, ...]:
        """Attempts that had to pass, and have a reward below the threshold."""
        scored = self.scored if self.must_pass else ()
        return tuple(one for one in scored if one.reward is not None and one.reward < self.threshold)

    @property
    def complete(self) -> bool:
        """Whether every attempt that was asked for has a reward, and a row."""
        return len(self.scored) == self.planned and not self.unwritten_rows

    @property
    def exit_code(self) -> int:
        """Exit code of a command that ran the run."""
        if self.interrupted:
            return exit_codes.INTERRUPTED
        return exit_codes.COMPLETE if self.complete and not self.broken else exit_codes.INCOMPLETE

    def count(self) -> dict[str, int]:
        """Counts attempts by the outcome of their last try."""
        return count_outcomes(self.final)

    def paid(self) -> dict[str, float]:
        """Sums the policy's tokens and US dollars over all tries; a response that a try took over counts once."""
        names = ("prompt_tokens", "generated_tokens", "cost")
        known = {result.episode_id for result in self.results}
        taken_over = [
            one.replayed for one in self.results if one.replayed is not None and one.replayed.episode_id in known
        ]
        return {
            name: sum(getattr(result, name) for result in self.results) - sum(getattr(one, name) for one in taken_over)
            for name in names
        }

    @property
    def environment_usage(self) -> EnvironmentUsage | None:
        """Spending of the environments over all tries; `None` if no environment makes model calls."""
        used = [result.environment_usage for result in self.results if result.environment_usage is not None]
        return sum(used, EnvironmentUsage()) if used else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready totals (the episodes are in `episodes.jsonl`)."""
        return {
            "planned": self.planned,
            "finished": len(self.finished),
            "tries": len(self.results),
            "scored": len(self.scored),
            "mean_reward": self.mean_reward,
            "outcomes": self.count(),
            **self.paid(),
            "environment_usage": asdict(used) if (used := self.environment_usage) is not None else None,
            "threshold": self.threshold,
            **({"must_pass": True} if self.must_pass else {}),
            "interrupted": self.interrupted,
            "ended_by": self.ended_by,
            "wall_sec": self.wall_sec,
            "max_loop_lag_sec": self.max_loop_lag_sec,
            "recording_failures": self.recording_failures,
            "unwritten_rows": self.unwritten_rows,
            "snapshots": sum(result.snapshots for result in self.results),
            "snapshot_failures": sum(result.snapshot_failures for result in self.results),
            "snapshot_wait_sec": sum(result.phase_sec.get("snapshot", 0.0) for result in self.results),
        }
