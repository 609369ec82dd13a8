"""An earlier conversation as plain chat, for an agent that offers its LLM no tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ares_exp.llms.request import Message


def as_plain_chat(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Writes calls of tools out as text; messages of tools and of the system become the user's."""
    return [_plain(message) for message in messages]


def _plain(message: Mapping[str, Any]) -> Message:
    content = message.get("content") or ""
    if message.get("role") != "assistant":
        return Message(role="user", content=content)
    calls = [_written_out(call.get("function", {})) for call in message.get("tool_calls") or ()]
    if calls and isinstance(content, str):
        content = "\n".join(([content] if content else []) + calls)
    elif calls:
        content = [*content, {"type": "text", "text": "\n".join(calls)}]
    return Message(role="assistant", content=content)


def _written_out(function: Mapping[str, Any]) -> str:
    return f"<tool_call>{json.dumps(dict(function), ensure_ascii=False)}</tool_call>"
