"""The report of a replay, as JSON and as text. It compares steps and rewards, and contains a determinism score."""

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
"""Outcomes of episodes that ended by themselves. Episodes with other outcomes were interrupted."""


@dataclass(frozen=True, slots=True)
class Score:
    """The determinism score: how many of the compared steps match their recording.

    Attributes:
        matching: Number of steps that are equal, either exactly or after normalising.
        compared: Number of matching, different and extra steps, plus the recorded steps that the replay did not reach.
            The latter do not count if Ctrl-C, a container failure, or an error of the replay policy ended the replay.
    """

    matching: int = 0
    compared: int = 0

    @property
    def value(self) -> float | None:
        """Ratio of matching steps to compared steps, in [0, 1]; `None` if no step was compared."""
        return self.matching / self.compared if self.compared else None

    @classmethod
    def total(cls, scores: Iterable[Score]) -> Self:
        """Returns the sum of several scores, so that every step has the same weight."""
        every = list(scores)
        return cls(sum(one.matching for one in every), sum(one.compared for one in every))

    def to_dict(self) -> dict[str, Any]:
        """Returns the score as JSON-ready data."""
        return {"score": self.value, "matching_steps": self.matching, "compared_steps": self.compared}


@dataclass(frozen=True, slots=True)
class ReplayedEpisode:
    """One recorded episode and its replay.

    Attributes:
        task_name, attempt: Task and attempt of the replay.
        recorded_id, episode_id: Ids of the recorded episode and of the replay.
        recorded_outcome, outcome: Outcomes of the recorded episode and of the replay.
        recorded_reward, reward: Rewards of the recorded episode and of the replay; `None` if there is no reward.
        steps: Comparisons of all steps, in order. Steps that only one of the two episodes has are included.
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
        """Creates an instance from comparisons of the reached steps. Adds a comparison for each step not reached."""
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
        """Score of the episode's steps."""
        matching = sum(step.is_same for step in self.steps)
        missed = self.count(Match.NOT_REACHED) if self.outcome in ENDED_BY_ITSELF else 0
        return Score(matching, matching + self.count(Match.DIFFERENT, Match.EXTRA) + missed)

    def count(self, *matches: Match) -> int:
        """Returns the number of steps whose comparison has one of the results `matches`."""
        return sum(step.match in matches for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Returns the episode as JSON-ready data."""
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
    """The result of a run with the replay policy.

    Attributes:
        recording: Path of the recording.
        normalisers: Names of the active normalisers, in order.
        episodes: Replayed episodes, in the order in which they ended.
    """

    recording: Path
    normalisers: tuple[str, ...]
    episodes: tuple[ReplayedEpisode, ...]

    @property
    def score(self) -> Score:
        """Score of all steps of all episodes."""
        return Score.total(episode.score for episode in self.episodes)

    def by_task(self) -> Mapping[str, Sequence[ReplayedEpisode]]:
        """Returns the episodes of each task, sorted by attempt."""
        tasks: dict[str, list[ReplayedEpisode]] = {}
        for episode in sorted(self.episodes, key=lambda one: (one.task_name, one.attempt)):
            tasks.setdefault(episode.task_name, []).append(episode)
        return tasks

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-ready data, the content of `replay.json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recording": str(self.recording),
            "normalisers": list(self.normalisers),
            **self.score.to_dict(),
            "tasks": {name: Score.total(one.score for one in own).to_dict() for name, own in self.by_task().items()},
            "episodes": [episode.to_dict() for own in self.by_task().values() for episode in own],
        }

    def render(self, stream: TextIO) -> None:
        """Writes a readable summary to `stream`. `replay.json` contains the full report."""
        write(stream, f"\nReplay of {printable(str(self.recording))}\n")
        if self.episodes:
            write(stream, draw(_table(self), stream))
        shown = [episode for own in self.by_task().values() for episode in own]
        shown.sort(key=lambda episode: episode.score.matching == episode.score.compared)  # different episodes first
        lines = [line for episode in shown[:MAX_EPISODES] for line in _episode(episode)]
        if len(shown) > MAX_EPISODES:
            lines.append(f"and {len(shown) - MAX_EPISODES} more episodes, in replay.json")
        write(stream, "\n".join([*lines, f"{_total(self.score)} Details: replay.json", ""]))
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
        yield f"  outcome {episode.outcome.value}; the recorded outcome was {episode.recorded_outcome.value}"
    if episode.reward != episode.recorded_reward:
        yield f"  reward {_number(episode.reward)}; the recorded reward was {_number(episode.recorded_reward)}"
    first = next((step for step in episode.steps if step.match is Match.DIFFERENT), None)
    if first is not None:
        yield f"  first difference at step {first.step}, in {one_line(first.where or '')} (- recorded, + now):"
        yield from (f"    {printable(line)}" for line in first.diff)


def _runs(steps: Sequence[StepComparison]) -> Iterator[str]:
    """Yields one description per sequence of equal results, such as `steps 0-3 exact` and `4 normalised (pids)`."""
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
    if score.value is None:
        return "-"
    return f"{score.value:.2f}" if score.value in (0.0, 1.0) else f"{min(max(score.value, 0.01), 0.99):.2f}"


def _mean(rewards: Sequence[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    return _number(sum(known) / len(known) if known else None)


def _number(reward: float | None) -> str:
    return "-" if reward is None else format_number(reward)
