"""Rows for preference training (such as DPO). Each row is a pair of attempts at the same task with different rewards.

```
rows, report = preference_rows(load("outputs/first").trajectories(), min_margin=0.5)
for row in rows:            # {"prompt": [...], "chosen": [...], "rejected": [...], "tools": [...], "task": …, …}
    print(dump_json(row), file=file)
report.sentences()          # skipped episodes and pairs, with reasons
```

Only one conversation of each attempt is used: the last version of the main conversation or, without a main
conversation, the last conversation. The prompt of a pair consists of the messages at the start that both conversations
have in common. It ends before a response from the model. `chosen` and `rejected` contain the remaining messages of the
better and the worse attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.llms.wire import plain
from ares_exp.records.run_dir import dump_json
from ares_exp.trajectories.exports.training_conversations import (
    Conversation,
    ExportReport,
    Reasoning,
    ToolArguments,
    conversations,
    rewarded,
)
from ares_exp.trajectories.records import EpisodeTrajectory


@dataclass(frozen=True, slots=True)
class _Attempt:
    episode_id: str
    reward: float
    conversation: Conversation


def preference_rows(
    trajectories: Iterable[EpisodeTrajectory],
    *,
    min_margin: float = 0.0,
    pairs_per_task: int = 4,
    tool_arguments: ToolArguments = "text",
    reasoning: Reasoning | None = None,
) -> tuple[Iterator[dict[str, Any]], ExportReport]:
    """Creates rows for preference training from pairs of attempts at the same task.

    Args:
        trajectories: The episodes. All episodes are read before the first row is created, and their conversations are
            kept in memory. Episodes without a reward are left out.
        min_margin: Minimum difference between the rewards of a pair. Attempts with equal rewards are never paired.
        pairs_per_task: Maximum number of pairs per task. Pairs of the best and the worst attempts come first.
        tool_arguments: See `training_conversations.conversations`.
        reasoning: See `training_conversations.conversations`. By default, the rows contain no reasoning, and the report
            counts the omitted blocks.

    Returns:
        An iterator over the JSON-ready rows, sorted by task, and a report, which is complete after the last row.

    Raises:
        ValueError: `min_margin` is negative, or `pairs_per_task` is below 1.
    """
    if not min_margin >= 0:
        raise ValueError(f"Expected a margin of at least 0, got {min_margin!r}.")
    if pairs_per_task < 1:
        raise ValueError(f"Expected at least 1 pair per task, got {pairs_per_task!r}.")
    report = ExportReport()

    def rows() -> Iterator[dict[str, Any]]:
        by_task: dict[str, list[_Attempt]] = {}
        for trajectory, reward in rewarded(trajectories, report):
            last = _last(conversations(trajectory, report, tool_arguments=tool_arguments, reasoning=reasoning))
            if last is None:
                report.left_out["episodes without a conversation"] += 1
                continue
            by_task.setdefault(trajectory.task_name, []).append(_Attempt(trajectory.episode_id, reward, last))
        for task, attempts in sorted(by_task.items()):
            for row in islice(_pairs_of_task(task, attempts, min_margin, report), pairs_per_task):
                report.rows += 1
                yield row

    return rows(), report


def _last(talked: Iterable[Conversation]) -> Conversation | None:
    """Returns the last version of the main conversation; if there is no main conversation, the last conversation."""
    last: Conversation | None = None
    for conversation in talked:
        if conversation.conversation == MAIN_CONVERSATION or last is None or last.conversation != MAIN_CONVERSATION:
            last = conversation
    return last


def _pairs_of_task(
    task: str, attempts: list[_Attempt], min_margin: float, report: ExportReport
) -> Iterator[dict[str, Any]]:
    ranking = sorted(attempts, key=lambda attempt: (-attempt.reward, attempt.episode_id))
    made: set[str] = set()
    if not _differ(ranking[0], ranking[-1], min_margin):
        report.left_out["episodes of tasks whose rewards differ too little"] += len(attempts)
        return
    pairs = (
        (ranking[at], ranking[at + gap]) for gap in range(len(ranking) - 1, 0, -1) for at in range(len(ranking) - gap)
    )
    for better, worse in pairs:  # pairs of the best and the worst attempts come first
        if not _differ(better, worse, min_margin):
            continue
        alternatives = _alternatives(better.conversation, worse.conversation)
        if isinstance(alternatives, str):
            report.left_out[f"pairs {alternatives}"] += 1
        elif (text := dump_json(alternatives)) in made:
            report.left_out["pairs that duplicate an earlier pair"] += 1
        else:
            made.add(text)
            yield alternatives | {
                "task": task,
                "conversation": better.conversation.conversation,
                "chosen_episode_id": better.episode_id,
                "chosen_reward": better.reward,
                "rejected_episode_id": worse.episode_id,
                "rejected_reward": worse.reward,
            }


def _differ(better: _Attempt, worse: _Attempt, min_margin: float) -> bool:
    margin = better.reward - worse.reward
    return margin > 0 and margin >= min_margin


def _alternatives(better: Conversation, worse: Conversation) -> dict[str, Any] | str:
    """Returns the row of a pair, or a reason why the pair is unusable, such as "of attempts with different tools"."""
    if better.tools != worse.tools:
        return "of attempts with different tools"
    chosen: Sequence[Any] = better.messages
    rejected: Sequence[Any] = worse.messages
    shorter = min(len(chosen), len(rejected))
    parting = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    if parting == len(chosen) == len(rejected):
        return "of attempts with the same messages"
    latest = min(parting, shorter - 1)
    replies = (at for at in range(latest, -1, -1) if chosen[at]["role"] == rejected[at]["role"] == "assistant")
    start = next(replies, 0)
    if start == 0:
        return "of attempts whose messages differ from the start"
    return {
        "prompt": plain(chosen[:start]),
        "chosen": plain(chosen[start:]),
        "rejected": plain(rejected[start:]),
        "tools": plain(better.tools),
    }
