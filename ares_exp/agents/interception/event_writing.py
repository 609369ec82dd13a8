"""Writing of answers for agents' clients: JSON, server-sent events, and ids of tool calls that are told apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from ares_exp.agents.interception.served_wire import Asked
from ares_exp.llms.response import LLMResponse, ToolCallData

DELTA_CHARS = 16_384
"""A longer text is sent in several events: some clients bound the length of a line."""


def to_json(value: Any) -> bytes:
    """Writes compact JSON, in ASCII: halves of characters that a model wrote stay what they are."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def event(value: Any, name: str | None = None) -> bytes:
    """Writes one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


def slices(text: str) -> Iterator[str]:
    """Yields a text in pieces; an empty one as one piece."""
    yield text[:DELTA_CHARS]
    for start in range(DELTA_CHARS, len(text), DELTA_CHARS):
        yield text[start : start + DELTA_CHARS]


def with_call_ids(asked: Asked, response: LLMResponse) -> LLMResponse:
    """Returns the answer with ids that its tool calls share with no other of the conversation.

    Agents find the result of a call by its id; policies may leave it empty, or start to count anew in each answer. The
    same answer to the same conversation gets the same ids.
    """
    if not any(isinstance(piece, ToolCallData) for piece in response.data):
        return response
    used = {
        call["id"]
        for message in asked.request.messages
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping) and isinstance(call.get("id"), str)
    }
    data = []
    for piece in response.data:
        if isinstance(piece, ToolCallData):
            if piece.id in used or not piece.id:
                # Not made of another id: Claude Code takes `X_2` for a copy of `X`, and loses its result.
                free = next(name for number in count(len(used)) if (name := f"call-{number}") not in used)
                piece = replace(piece, id=free)
            used.add(piece.id)
        data.append(piece)
    return replace(response, data=data)
