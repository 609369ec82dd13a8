"""The replay report for people: a table by task, the steps of each episode, what differs first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from ares_exp.command_line.terminal import one_line, printable
from ares_exp.policies.replay_report import ReplayedEpisode, ReplayReport, Score
from ares_exp.policies.request_comparison import Match, StepComparison
from ares_exp.progress import format_number
from ares_exp.summary import draw, write

if TYPE_CHECKING:
    from rich.table import Table

MAX_TASKS = 200
MAX_EPISODES = 20
ALWAYS_SHOWN = (Match.EXACT, Match.NORMALISED, Match.DIFFERENT)


def render(report: ReplayReport, stream: TextIO) -> None:
    """Writes the report of a replay; what it leaves out is in `replay.json`."""
    write(stream, f"\nReplay of {printable(str(report.recording))}\n")
    if report.episodes:
        write(stream, draw(_table(report), stream))
    told = [episode for own in report.by_task().values() for episode in own]
    told.sort(key=lambda episode: episode.score.matching == episode.score.compared)  # what differs comes first
    lines = [line for episode in told[:MAX_EPISODES] for line in _episode(episode)]
    if len(told) > MAX_EPISODES:
        lines.append(f"and {len(told) - MAX_EPISODES} more episodes, in replay.json")
    write(stream, "\n".join([*lines, _total(report.score), ""]))
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
    """`steps 0-3 exact`, `4 normalised (pids)`, …: neighbours that compare alike are told together."""
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
    """Two digits; what is not all is never shown as if it were."""
    if score.value is None:
        return "-"
    return f"{score.value:.2f}" if score.value in (0.0, 1.0) else f"{min(max(score.value, 0.01), 0.99):.2f}"


def _mean(rewards: Sequence[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    return _number(sum(known) / len(known) if known else None)


def _number(reward: float | None) -> str:
    return "-" if reward is None else format_number(reward)
