"""Rows for preference training (DPO and its kin), made of attempts at one task with different rewards.

```
rows, report = preference_rows(trajectories, completion="episode", min_margin=0.5, pairs_per_task=4, columns=True)
for row in rows:            # {"prompt": [...], "chosen": [...], "rejected": [...], "tools": [...], "task": …, …}
    print(dump_json(row), file=file)
report.sentences()          # what was left out, and why
```

An attempt is the conversation with which an episode ended, that of its main lane where it has one. The prompt of a pair
is the longest beginning of both attempts that ends before a reply of the model; `chosen` and `rejected` are how the
better and the worse one went on: to their end (`"episode"`), or that one reply alone (`"turn"`), where it differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ares_exp.environment import MAIN_LANE
from ares_exp.llms.wire import plain
from ares_exp.records.run_dir import dump_json
from ares_exp.trajectories.exports.training_conversations import (
    Conversation,
    EpisodeFilter,
    ExportReport,
    Reasoning,
    ToolArguments,
    conversations,
)
from ares_exp.trajectories.records import EpisodeTrajectory

Completion = Literal["episode", "turn"]


@dataclass(frozen=True, slots=True)
class _Attempt:
    episode_id: str
    reward: float
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class _Pairing:
    completion: Completion
    min_margin: float
    pairs_per_task: int
    columns: bool


def preference_rows(
    trajectories: Iterable[EpisodeTrajectory],
    *,
    keep: EpisodeFilter | None = None,
    completion: Completion = "episode",
    min_margin: float = 0.0,
    pairs_per_task: int = 4,
    columns: bool = False,
    tool_arguments: ToolArguments = "text",
    reasoning: Reasoning | None = None,
) -> tuple[Iterator[dict[str, Any]], ExportReport]:
    """Makes rows for preference training.

    Args:
        trajectories: The episodes. All are read before the first row is made, and what is needed of them is kept.
        keep: Which of them are used; by default all that have a reward.
        completion: Whether the alternatives are the rest of the episodes or one reply.
        min_margin: The rewards of a pair differ by at least this much; they always differ.
        pairs_per_task: At most so many pairs of one task: of its best and worst attempts first.
        columns: Whether rows also have `task` and `lane`, and `episode_id` and `reward` of both, as
            `chosen_episode_id` and so on.
        tool_arguments: See `training_conversations.conversations`.
        reasoning: Likewise; by default it is left out, and counted.

    Returns:
        The rows, JSON-ready, by task, reward and id whatever the order of the episodes, and a report that is complete
        when they have been read.

    Raises:
        ValueError: `min_margin` is negative, or `pairs_per_task` below 1.
    """
    if not min_margin >= 0:
        raise ValueError(f"Expected a margin of at least 0, got {min_margin!r}.")
    if pairs_per_task < 1:
        raise ValueError(f"Expected at least 1 pair a task, got {pairs_per_task!r}.")
    report = ExportReport()
    pairing = _Pairing(completion, min_margin, pairs_per_task, columns)
    return _rows(trajectories, keep or EpisodeFilter(), pairing, tool_arguments, reasoning, report), report


def _rows(
    trajectories: Iterable[EpisodeTrajectory],
    keep: EpisodeFilter,
    pairing: _Pairing,
    tool_arguments: ToolArguments,
    reasoning: Reasoning | None,
    report: ExportReport,
) -> Iterator[dict[str, Any]]:
    by_task: dict[str, list[_Attempt]] = {}
    for trajectory in trajectories:
        report.episodes += 1
        if reason := keep.why_not(trajectory):
            report.left_out[f"episodes {reason}"] += 1
            continue
        read = conversations(trajectory, report, tool_arguments=tool_arguments, reasoning=reasoning)
        if (talked := _last(read)) is None or trajectory.total_reward is None:
            report.left_out["episodes without a conversation"] += 1
            continue
        attempt = _Attempt(trajectory.episode_id, trajectory.total_reward, talked)
        by_task.setdefault(trajectory.task_name, []).append(attempt)
    for task, attempts in sorted(by_task.items()):
        for row in _pairs_of_task(task, attempts, pairing, report):
            report.rows += 1
            yield row


def _last(talked: Iterable[Conversation]) -> Conversation | None:
    """Returns the last conversation of the main lane, or of any where that has none."""
    last: Conversation | None = None
    for conversation in talked:
        if conversation.lane == MAIN_LANE or last is None or last.lane != MAIN_LANE:
            last = conversation
    return last


def _pairs_of_task(
    task: str, attempts: list[_Attempt], pairing: _Pairing, report: ExportReport
) -> Iterator[dict[str, Any]]:
    ranking = sorted(attempts, key=lambda attempt: (-attempt.reward, attempt.episode_id))
    if not _differ(ranking[0], ranking[-1], pairing):
        report.left_out["episodes of tasks whose attempts have rewards that are too close"] += len(attempts)
        return
    made: set[str] = set()
    for better, worse in _best_and_worst_first(ranking, pairing):
        if len(made) == pairing.pairs_per_task:
            return
        alternatives = _alternatives(better.conversation, worse.conversation, pairing.completion)
        if isinstance(alternatives, str):
            report.left_out[f"pairs {alternatives}"] += 1
            continue
        row: dict[str, Any] = alternatives
        if (text := dump_json(row)) in made:
            report.left_out["pairs that the task has already"] += 1
            continue
        made.add(text)
        if pairing.columns:
            row |= {"task": task, "lane": better.conversation.lane}
            row |= {"chosen_episode_id": better.episode_id, "chosen_reward": better.reward}
            row |= {"rejected_episode_id": worse.episode_id, "rejected_reward": worse.reward}
        yield row


def _differ(better: _Attempt, worse: _Attempt, pairing: _Pairing) -> bool:
    margin = better.reward - worse.reward
    return margin > 0 and margin >= pairing.min_margin


def _best_and_worst_first(ranking: list[_Attempt], pairing: _Pairing) -> Iterator[tuple[_Attempt, _Attempt]]:
    """Pairs whose rewards differ enough, the first few of several attempts."""
    for distance in range(len(ranking) - 1, 0, -1):
        pairs = [
            (better, worse)
            for better, worse in zip(ranking, ranking[distance:], strict=False)
            if _differ(better, worse, pairing)
        ]
        if not pairs:
            return  # attempts that are closer in the ranking are closer in reward
        yield from pairs


def _alternatives(better: Conversation, worse: Conversation, completion: Completion) -> dict[str, Any] | str:
    """Returns the row, or why there is none, in words that follow "3 pairs"."""
    if better.tools != worse.tools:
        return "of attempts with different tools"
    chosen: Sequence[Any] = better.messages
    rejected: Sequence[Any] = worse.messages
    shorter = min(len(chosen), len(rejected))
    parting = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    if parting == len(chosen) == len(rejected):
        return "of attempts that are equal"
    latest = min(parting, shorter - 1)
    replies = (at for at in range(latest, -1, -1) if _is_reply(chosen[at]) and _is_reply(rejected[at]))
    start = next(replies, 0)
    if start == 0:
        return "of attempts that have no beginning in common"
    if completion == "turn":
        if start != parting:
            return "of attempts that part where the environment speaks, not the model"
        chosen, rejected = chosen[: start + 1], rejected[: start + 1]
    return {
        "prompt": plain(chosen[:start]),
        "chosen": plain(chosen[start:]),
        "rejected": plain(rejected[start:]),
        "tools": plain(better.tools),
    }


def _is_reply(message: Any) -> bool:
    return bool(message["role"] == "assistant")
