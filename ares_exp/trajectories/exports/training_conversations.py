"""Conversations as chat messages, from which the exports create rows for supervised and preference training.

A conversation is one request and its reply: the system prompt as the first message, the history, and the reply. The
messages have the chat-completions form (`role`, `content`, `tool_calls`, `tool_call_id`), which TRL and similar
trainers accept (https://huggingface.co/docs/trl/dataset_formats). Text parts are joined, and missing content becomes
"", because a column of a data set must have one type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.llms.chat_messages import KnownReasoning, arguments_object, call_part, reasoning_text
from ares_exp.llms.request import FrozenList, Message, freeze
from ares_exp.llms.response import ThinkingData
from ares_exp.records.terminal_text import count_of
from ares_exp.trajectories.records import EpisodeTrajectory, conversation_of

ToolArguments = Literal["text", "object"]
Reasoning = Literal["field", "think"]
"""How rows contain the model's reasoning.

`field` stores the reasoning in the field `reasoning_content` of a message, which the chat templates of most reasoning
models read. `think` adds the reasoning to the start of the text, between `<think>` and `</think>`."""


@dataclass(slots=True)
class ExportReport:
    """Numbers of the episodes that an export read, of the rows that it created, and of the items that it left out.

    The numbers are complete after the last row. `left_out` counts items by reason, such as `"episodes without a
    reward"`.
    """

    episodes: int = 0
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def sentences(self) -> list[str]:
        """Returns the counts as sentences, such as "3 rows from 2 episodes."."""
        counted = f"{count_of(self.rows, 'row')} from {count_of(self.episodes, 'episode')}."
        return [counted, *left_out_sentences(self.left_out)]


def left_out_sentences(left_out: Mapping[str, int]) -> list[str]:
    """Returns one sentence per reason in `left_out`, such as "Left out: 1 pair of …".

    A reason should start with a plural noun, such as "pairs of …", so that the noun can be changed to the singular.
    """
    sentences = []
    for reason, count in sorted(left_out.items()):
        things, _, rest = reason.partition(" ")
        counted = f"{count_of(count, things[:-1])} {rest}" if things.endswith("s") else f"{count:,} {reason}"
        sentences.append(f"Left out: {counted}.")
    return sentences


@dataclass(frozen=True, slots=True)
class Conversation:
    """One request and the response to it, as a list of chat messages.

    Attributes:
        tools: Definitions of the tools that the model could call; may be empty.
        messages: Messages from the system prompt to the reply. They are immutable, and may be shared with other
            conversations.
        conversation: `main`, or the name of the conversation of a sub-agent or a background request.
    """

    tools: FrozenList
    messages: FrozenList
    conversation: str = MAIN_CONVERSATION


def rewarded(
    trajectories: Iterable[EpisodeTrajectory], report: ExportReport
) -> Iterator[tuple[EpisodeTrajectory, float]]:
    """Yields the episodes that have a reward, with it. The report counts all episodes, and those that are left out."""
    for trajectory in trajectories:
        report.episodes += 1
        if trajectory.total_reward is None:
            report.left_out["episodes without a reward"] += 1
        else:
            yield trajectory, trajectory.total_reward


def conversations(
    trajectory: EpisodeTrajectory,
    report: ExportReport,
    *,
    tool_arguments: ToolArguments,
    reasoning: Reasoning | None = None,
) -> Iterator[Conversation]:
    """Yields one conversation for each response in an episode.

    Args:
        trajectory: The episode.
        report: Report that counts the steps that are left out.
        tool_arguments: Type of the arguments of tool calls: JSON text, as in the chat-completions form, or an object,
            which some chat templates expect.
        reasoning: Form of the model's reasoning in all responses, including earlier ones. If `None`, reasoning is left
            out.
    """
    reader = _ChatReader(tool_arguments, reasoning)
    for asked, answered in zip(trajectory.steps, trajectory.steps[1:], strict=False):
        request = reader.request(asked.observation)
        if request is None:
            report.left_out["steps whose observation is not a chat request"] += 1
        elif (reply := reader.reply(answered.action)) is None:
            report.left_out["steps whose action has neither text nor a tool call"] += 1
        else:
            thinking = action_thinking(answered.action)
            if thinking and reasoning is None:
                report.left_out["blocks of reasoning (--reasoning keeps them)"] += 1
            messages = FrozenList((*request.messages, reader.remembered(reply, thinking)))
            yield Conversation(request.tools, messages, conversation_of(asked.observation or {}))


class _ChatReader:
    """Converts requests and replies of one episode to chat messages. Each message is converted only once."""

    def __init__(self, tool_arguments: ToolArguments, reasoning: Reasoning | None) -> None:
        self._objects = tool_arguments == "object"
        self._reasoning = reasoning
        self._known = KnownReasoning()
        self._read: dict[int, Message] = {}  # by the id() of messages that the trajectory keeps alive

    def request(self, observation: Any) -> Conversation | None:
        messages = observation.get("messages") if isinstance(observation, Mapping) else None
        if not _are_mappings(messages) or not all(isinstance(message.get("role"), str) for message in messages):
            return None
        prompt, tools = observation.get("system_prompt"), observation.get("tools")
        system = [Message(role="system", content=prompt)] if isinstance(prompt, str) else []
        if not all(isinstance(message.get("tool_calls"), list | tuple | None) for message in messages):
            return None
        read: Sequence[Any] = [self._read.get(id(message)) or self._message(message) for message in messages]
        if self._reasoning is not None:
            read = self._known.put_into(read, self._with_reasoning)
        return Conversation(freeze(tools) if _are_mappings(tools) else FrozenList(), FrozenList((*system, *read)))

    def reply(self, action: Any) -> Message | None:
        pieces = action.get("data") if isinstance(action, Mapping) else None
        if not _are_mappings(pieces):
            return None
        text = "".join(piece["content"] for piece in pieces if isinstance(piece.get("content"), str))
        called = (piece for piece in pieces if {"id", "name", "arguments"} <= piece.keys())
        calls = [call_part(piece["id"], piece["name"], piece["arguments"]) for piece in called]
        if not text and not calls:
            return None
        return self._normal({"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}))

    def remembered(self, reply: Message, thinking: Sequence[ThinkingData]) -> Message:
        """Returns the reply with its reasoning, and remembers the reasoning for later requests.

        Later requests contain the reply as a part of their history, often without the reasoning. The
        method `request` then adds the reasoning again.
        """
        if self._reasoning is None:
            return reply
        self._known.add_message(reply, thinking)
        return self._with_reasoning(reply, thinking) if thinking else reply

    def _with_reasoning(self, message: Mapping[str, Any], pieces: Sequence[ThinkingData]) -> Message:
        text, content = reasoning_text(pieces), message["content"]
        if not text:
            return Message(message)
        if self._reasoning == "think" and isinstance(content, str):
            return Message({**message, "content": f"<think>\n{text}\n</think>\n\n{content}"})
        return Message({**message, "reasoning_content": text})

    def _message(self, message: Mapping[str, Any]) -> Message:
        self._read[id(message)] = normal = self._normal(message)
        return normal

    def _normal(self, message: Mapping[str, Any]) -> Message:
        rest = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
        if calls := rest.pop("tool_calls", None):
            rest["tool_calls"] = [self._call(call) for call in calls]
        ordered = dict(sorted(rest.items()))
        return Message({"role": message["role"], "content": _text(message.get("content")), **freeze(ordered)})

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not self._objects or not isinstance(function, Mapping):
            return call
        given = function.get("arguments")
        read = arguments_object(given) if isinstance(given, str) and given else None
        return {**call, "function": {**function, "arguments": given if read is None else read}}


def action_thinking(action: Any) -> list[ThinkingData]:
    """Returns the reasoning of a recorded action; empty for actions that are not LLM responses."""
    pieces = action.get("data") if isinstance(action, Mapping) else None
    found = [piece for piece in pieces if "thinking" in piece] if _are_mappings(pieces) else []
    return [
        ThinkingData(piece["thinking"], redacted=piece.get("redacted") is True)
        for piece in found
        if isinstance(piece["thinking"], str)
    ]


def _are_mappings(values: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(values, Sequence) and all(isinstance(value, Mapping) for value in values)


def _text(content: Any) -> Any:
    """Joins the parts of a message's content into one string, unless a part is not text. Missing content becomes ""."""
    if content is None:
        return ""
    if _are_mappings(content) and all(isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    return freeze(content)
