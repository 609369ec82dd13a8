"""Formatting of chat requests and responses as plain text, for `render()` and for libraries that need strings.

The functions accept requests of any class with an attribute `messages`, even from other packages. They format other
objects with `str`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ares_exp.llms.response import LLMResponse, Piece, TextData, ThinkingData


@dataclass(frozen=True, slots=True)
class Exchange:
    """The last `reset` or `step`: the response passed to it (`None` for `reset`), and the time step it returned."""

    action: Any
    observation: Any
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False

    def __str__(self) -> str:
        """Formats the exchange for a terminal: adds headings like `[user]`, and replaces unsafe control characters."""
        sections = [] if self.action is None else [section("assistant", response_text(self.action))]
        sections += [section(_role(message), message_text(message)) for message in new_messages(self.observation)]
        if self.terminated or self.truncated:
            how = "terminated" if self.terminated else "truncated"
            sections.append(f"[end] {how}, reward {self.reward:g}")
        return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}"
                       for char in "\n\n".join(sections))  # fmt: skip


def section(role: str, text: str) -> str:
    """Formats one message, with its role in the first line: `[role]`."""
    return f"[{role}]\n{text}"


def conversation_text(observation: Any) -> str:
    """Formats the system prompt and all messages of the request, oldest first, each under a heading."""
    system = getattr(observation, "system_prompt", None)
    sections = [section("system", system)] if isinstance(system, str) else []
    sections += [section(_role(message), message_text(message)) for message in messages_of(observation)]
    return "\n\n".join(sections)


def news_text(observation: Any) -> str:
    """Formats the messages of `new_messages`, without headings."""
    return "\n\n".join(message_text(message) for message in new_messages(observation))


def new_messages(observation: Any) -> list[Any]:
    """Returns the messages after the policy's last response, or all messages if there is no response."""
    found = messages_of(observation)
    for index in range(len(found) - 1, -1, -1):
        if _role(found[index]) == "assistant":
            return list(found[index + 1 :])
    return list(found)


def messages_of(observation: Any) -> Sequence[Any]:
    """Returns the messages of a request. Any other observation is formatted with `str`, and returned as one message."""
    found = observation.get("messages") if isinstance(observation, Mapping) else getattr(observation, "messages", None)
    if isinstance(found, list | tuple):
        return found
    return [] if observation is None else [{"role": "observation", "content": str(observation)}]


def message_text(message: Any) -> str:
    """Formats the content of a message, which is a text or a list of parts, and then its tool calls, one per line."""
    if not isinstance(message, Mapping):
        return str(message)
    return "\n".join([*_content(message.get("content")), *_tool_calls(message.get("tool_calls") or ())])


def response_text(action: Any) -> str:
    """Formats the reasoning, text and tool calls of a response. Other objects are formatted with `str`."""
    return "\n".join(map(_piece, action.data)) if isinstance(action, LLMResponse) else str(action)


def _piece(piece: Piece) -> str:
    if isinstance(piece, ThinkingData):
        return f"<thinking> {'(encrypted)' if piece.redacted else piece.content}"
    return piece.content if isinstance(piece, TextData) else _tool_call(piece.name, piece.arguments)


def _role(message: Any) -> str:
    return str(message.get("role", "message")) if isinstance(message, Mapping) else "message"


def _content(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | tuple):
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            kind = part.get("type", "part") if isinstance(part, Mapping) else "part"
            yield text if isinstance(text, str) else f"<{kind}>"
    elif content is not None:
        yield json.dumps(content, default=str)


def _tool_calls(calls: Iterable[Any]) -> Iterator[str]:
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield _tool_call(function.get("name"), function.get("arguments", ""))


def _tool_call(name: Any, arguments: Any) -> str:
    return f"<tool call> {name}({arguments})"
