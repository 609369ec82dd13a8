"""The report of a replay: each step compared, rewards, and a determinism score; as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.records.terminal_text import draw, format_number, one_line, printable, write
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.request_diff import Match, StepComparison

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1

MAX_TASKS = 200
MAX_EPISODES = 20
ALWAYS_SHOWN = (Match.EXACT, Match.NORMALISED, Match.DIFFERENT)

ENDED_BY_ITSELF = (Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.AGENT_ERROR, Outcome.VERIFIER_ERROR)
"""Outcomes of episodes whose agent was not interrupted."""


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
        """Adds up scores: every step counts the same."""
        every = list(scores)
        return cls(sum(one.matching for one in every), sum(one.compared for one in every))

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form."""
        return {"score": self.value, "matching_steps": self.matching, "compared_steps": self.compared}


@dataclass(frozen=True, slots=True)
class ReplayedEpisode:
    """One episode: as it was recorded, and as it was run now.

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
        """Combines the recorded episode, its result now and the compared steps.

        Args:
            recorded: The episode as it was recorded.
            result: Its result now.
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
        matching = sum(step.is_same for step in self.steps)
        missed = self.count(Match.NOT_REACHED) if self.outcome in ENDED_BY_ITSELF else 0
        return Score(matching, matching + self.count(Match.DIFFERENT, Match.EXTRA) + missed)

    def count(self, *matches: Match) -> int:
        """Counts the steps with one of these matches."""
        return sum(step.match in matches for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form."""
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
        recording: What was run again.
        normalisers: Names of the normalisers in force, in order.
        episodes: The episodes that were run, in the order in which they ended.
    """

    recording: Path
    normalisers: tuple[str, ...]
    episodes: tuple[ReplayedEpisode, ...]

    @property
    def score(self) -> Score:
        """Of all steps of all episodes."""
        return Score.total(episode.score for episode in self.episodes)

    def by_task(self) -> Mapping[str, Sequence[ReplayedEpisode]]:
        """Returns the episodes of each task, by attempt."""
        tasks: dict[str, list[ReplayedEpisode]] = {}
        for episode in sorted(self.episodes, key=lambda one: (one.task_name, one.attempt)):
            tasks.setdefault(episode.task_name, []).append(episode)
        return tasks

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form, the content of `replay.json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recording": str(self.recording),
            "normalisers": list(self.normalisers),
            **self.score.to_dict(),
            "tasks": {name: Score.total(one.score for one in own).to_dict() for name, own in self.by_task().items()},
            "episodes": [episode.to_dict() for own in self.by_task().values() for episode in own],
        }

    def render(self, stream: TextIO) -> None:
        """Writes the report for people; what it leaves out is in `replay.json`."""
        _render(self, stream)


def _render(report: ReplayReport, stream: TextIO) -> None:
    write(stream, f"\nReplay of {printable(str(report.recording))}\n")
    if report.episodes:
        write(stream, draw(_table(report), stream))
    told = [episode for own in report.by_task().values() for episode in own]
    told.sort(key=lambda episode: episode.score.matching == episode.score.compared)  # what differs comes first
    lines = [line for episode in told[:MAX_EPISODES] for line in _episode(episode)]
    if len(told) > MAX_EPISODES:
        lines.append(f"and {len(told) - MAX_EPISODES} more episodes, in replay.json")
    write(stream, "\n".join([*lines, f"{_total(report.score)} Details: replay.json", ""]))
    stream.flush()


def _table(report: ReplayReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold")
    table.add_column("task", overflow="fold")
    kinds = [kind for kind in Match if kind in ALWAYS_SHOWN or any(one.count(kind) for one in report.episodes)]
    for name in (*(kind.value for kind in kinds), "score", "reward"):
        table.add_column(name, justify="right")
    tasks = report.by_task()
    for name, own in list(tasks.items())[:MAX_TASKS]:
        counts = [str(sum(episode.count(kind) for episode in own)) for kind in kinds]
        rewards = [_mean([episode.recorded_reward for episode in own]), _mean([episode.reward for episode in own])]
        score = _ratio(Score.total(episode.score for episode in own))
        table.add_row(*map(Text, (printable(name), *counts, score, " -> ".join(dict.fromkeys(rewards)))))
    if len(tasks) > MAX_TASKS:
        table.caption = f"and {len(tasks) - MAX_TASKS} more tasks, in replay.json"
    return table


def _episode(episode: ReplayedEpisode) -> Iterator[str]:
    yield f"{one_line(episode.recorded_id)}, attempt {episode.attempt}: {', '.join(_runs(episode.steps)) or 'no steps'}"
    if episode.outcome is not episode.recorded_outcome:
        yield f"  ended as {episode.outcome.value}; recorded was {episode.recorded_outcome.value}"
    if episode.reward != episode.recorded_reward:
        yield f"  reward {_number(episode.reward)}; recorded was {_number(episode.recorded_reward)}"
    first = next((step for step in episode.steps if step.match is Match.DIFFERENT), None)
    if first is not None:
        yield f"  step {first.step} differs first, in {one_line(first.where or '')} (- recorded, + now):"
        yield from (f"    {printable(line)}" for line in first.diff)


def _runs(steps: Sequence[StepComparison]) -> Iterator[str]:
    """Yields `steps 0-3 exact`, `4 normalised (pids)`, …: neighbours with the same match are one entry."""
    for number, ((match, names), group) in enumerate(groupby(steps, key=lambda one: (one.match, one.normalisers))):
        alike = list(group)
        first, last = alike[0].step, alike[-1].step
        place = str(first) if first == last else f"{first}-{last}"
        word = ("step " if first == last else "steps ") if number == 0 else ""
        yield f"{word}{place} {match.value}" + (f" ({', '.join(map(one_line, names))})" if names else "")


def _total(score: Score) -> str:
    if score.value is None:
        return "Determinism: no step could be compared."
    return f"Determinism {_ratio(score)}: {score.matching} of {score.compared} steps match."


def _ratio(score: Score) -> str:
    """Returns two digits; anything below 1 is shown as at most 0.99."""
    if score.value is None:
        return "-"
    return f"{score.value:.2f}" if score.value in (0.0, 1.0) else f"{min(max(score.value, 0.01), 0.99):.2f}"


def _mean(rewards: Sequence[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    return _number(sum(known) / len(known) if known else None)


def _number(reward: float | None) -> str:
    return "-" if reward is None else format_number(reward)
