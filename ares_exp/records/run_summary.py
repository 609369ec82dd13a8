"""The totals of a run: outcomes, rewards, tokens and cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.records import exit_codes
from ares_exp.records.results import UNFINISHED, EnvironmentUsage, EpisodeResult, count_outcomes, final_results


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The totals of a run, computed from its results.

    Attributes:
        planned: Number of planned attempts.
        results: Results of all episodes, including retried ones, in the order in which they ended.
        interrupted: Whether Ctrl-C or SIGTERM ended the run.
        ended_by: Message about the exhausted budget or failed write that ended the run; `None` if it ended otherwise.
        wall_sec: Wall-clock seconds of all sessions of the run.
        recording_failures: Number of trajectories, metrics and summary files that could not be recorded.
        unwritten_rows: Number of results that are missing in `episodes.jsonl`.
        snapshot_dir: Directory of the snapshots; `None` if the run does not take snapshots.
        max_loop_lag_sec: Longest time for which the event loop was blocked, in seconds.
        threshold: Minimum reward of an attempt that passes.
        must_pass: Whether every attempt should pass, because the policy ran the tasks' reference solutions.
        spenders: Descriptions of the components whose model calls count as `environment_usage`; empty if unknown.
    """

    planned: int
    results: tuple[EpisodeResult, ...] = field(repr=False)  # for large runs, the repr would take seconds
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
        """The result of the last episode of each attempt."""
        return final_results(self.results)

    @property
    def finished(self) -> tuple[EpisodeResult, ...]:
        """The results of all attempts that ended without an interruption, including attempts with an error."""
        return tuple(result for result in self.final if result.outcome not in UNFINISHED)

    @property
    def scored(self) -> tuple[EpisodeResult, ...]:
        """The results of the attempts that have a reward."""
        return tuple(result for result in self.final if result.reward is not None)

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of the attempts that have a reward; `None` if there are no rewards."""
        rewards = [result.reward for result in self.scored if result.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def broken(self) -> tuple[EpisodeResult, ...]:
        """The results with rewards below the threshold, if reference solutions ran (`must_pass`); otherwise empty."""
        scored = self.scored if self.must_pass else ()
        return tuple(one for one in scored if one.reward is not None and one.reward < self.threshold)

    @property
    def complete(self) -> bool:
        """Whether every planned attempt has a reward, and all rows were written."""
        return len(self.scored) == self.planned and not self.unwritten_rows

    @property
    def exit_code(self) -> int:
        """The exit code of the command that executes the run."""
        if self.interrupted:
            return exit_codes.INTERRUPTED
        return exit_codes.COMPLETE if self.complete and not self.broken else exit_codes.INCOMPLETE

    def count(self) -> dict[str, int]:
        """Returns the number of attempts for each outcome of their last episode."""
        return count_outcomes(self.final)

    def paid(self) -> dict[str, float]:
        """Sums the policy's tokens and cost (in US dollars) over all episodes.

        A response that a later episode replayed was paid only once, and is counted only once.
        """
        names = ("prompt_tokens", "generated_tokens", "cost")
        known = {result.episode_id for result in self.results}
        replayed = (result.replayed for result in self.results)
        taken_over = [one for one in replayed if one is not None and one.episode_id in known]
        return {
            name: sum(getattr(result, name) for result in self.results) - sum(getattr(one, name) for one in taken_over)
            for name in names
        }

    @property
    def environment_usage(self) -> EnvironmentUsage | None:
        """The tokens and cost of the environments' own models in all episodes; `None` if there are no such models."""
        used = [result.environment_usage for result in self.results if result.environment_usage is not None]
        return sum(used, EnvironmentUsage()) if used else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the totals in JSON-ready form, as in `summary.json`, without the results of the episodes."""
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
