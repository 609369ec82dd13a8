"""Rows for supervised fine-tuning (SFT), made from the conversations of episodes.

```
rows, report = sft_rows(load("outputs/first", min_reward=1.0).trajectories())
for row in rows:  # {"messages": [...], "tools": [...], "episode_id": …, "task": …, "conversation": …, "reward": …}
    print(dump_json(row), file=file)
report.sentences()          # skipped episodes and steps, with reasons
```

A row is a conversation whose last message comes from the model. Each request of an episode repeats the conversation so
far. If a conversation is the start of a longer one, only the longer one becomes a row. Therefore, an agent that only
appends messages produces one row, and an agent that rewrites its history produces one row for each version. A
conversation that occurs several times, even in different episodes, becomes only one row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from ares_exp.llms.request import FrozenList, Message
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
from ares_exp.trajectories.files.step_encoding import ConversationWriter
from ares_exp.trajectories.records import EpisodeTrajectory


def sft_rows(
    trajectories: Iterable[EpisodeTrajectory],
    *,
    tool_arguments: ToolArguments = "text",
    reasoning: Reasoning | None = None,
) -> tuple[Iterator[dict[str, Any]], ExportReport]:
    """Creates rows for supervised fine-tuning, one per conversation.

    Args:
        trajectories: The episodes, which are read one at a time. Episodes without a reward are left out.
        tool_arguments: See `training_conversations.conversations`.
        reasoning: See `training_conversations.conversations`. By default, the rows contain no reasoning, and the report
            counts the omitted blocks.

    Returns:
        An iterator over the JSON-ready rows, in the order of the episodes, and a report, which is complete after the
        last row.
    """
    report = ExportReport()

    def rows() -> Iterator[dict[str, Any]]:
        seen: set[bytes] = set()
        for trajectory, reward in rewarded(trajectories, report):
            talked = conversations(trajectory, report, tool_arguments=tool_arguments, reasoning=reasoning)
            for conversation in _maximal(talked):
                row: dict[str, Any] = {"messages": plain(conversation.messages), "tools": plain(conversation.tools)}
                digest = hashlib.sha256(dump_json(row).encode()).digest()
                if digest in seen:
                    report.left_out["conversations that duplicate an earlier conversation"] += 1
                    continue
                seen.add(digest)
                report.rows += 1
                yield row | {
                    "episode_id": trajectory.episode_id,
                    "task": trajectory.task_name,
                    "conversation": conversation.conversation,
                    "reward": reward,
                }

    return rows(), report


def _maximal(all_of_them: Iterable[Conversation]) -> list[Conversation]:
    """Returns the conversations that are not the start of a longer conversation."""
    tree = ConversationWriter()
    by_node: dict[int, Conversation] = {}
    parents: set[int] = set()
    head = Message(tools=FrozenList())
    for conversation in all_of_them:
        if conversation.tools != head["tools"]:
            head = Message(tools=conversation.tools)
        # The tools come first, because conversations with different tools are distinct.
        added = tree.add(FrozenList((head, *conversation.messages)))
        parents.update(parent for parent, _ in added.new_nodes)
        by_node[added.node] = conversation
    return [conversation for node, conversation in by_node.items() if node not in parents]
