"""Reasoning in chat-completions messages: conversion of its various fields, and its addition to later requests.

| in a message of the assistant | for example |
|---|---|
| `reasoning_content`, a text | DeepSeek, SGLang, vLLM |
| `reasoning`, a text | OpenRouter, newer vLLM |
| `reasoning_details`, objects of several types (see `_DETAILS`), some with a `signature` | OpenRouter |
| parts of the `content` with the type `thinking` | Mistral |

Engines separate `<think>…</think>` from the text if they are started with the model's reasoning parser. Otherwise the
reasoning stays in the text.

Agents keep the text of a response, but not its reasoning. Some endpoints require the reasoning in later requests.
`KnownReasoning` finds the response that a message repeats, and adds its reasoning to the message.
"""

from __future__ import annotations

import json
from base64 import b64encode, urlsafe_b64decode
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from ares_exp.llms.request import REASONING_FIELDS
from ares_exp.llms.response import LLMResponse, ThinkingData, ToolCallData, piece_from_dict, piece_to_dict
from ares_exp.llms.wire import Report, WireFormatError, parse_body, shorten

ReasoningField = Literal["reasoning_content", "reasoning", "reasoning_details"]


def reasoning_of_message(message: Mapping[str, Any], lose: Report) -> list[ThinkingData]:
    """Returns the reasoning of an assistant message.

    If `reasoning_details` contain readable reasoning, the text fields are ignored, because they have the same content.
    From each detail, only the content and the signature are kept.

    Args:
        message: Assistant message.
        lose: Callback that receives a description of reasoning in an unknown format. Unless the callback raises an
            error, this reasoning is dropped.
    """
    details = message.get("reasoning_details")
    if not isinstance(details, list | tuple | None):  # a tuple in a parsed request
        lose("`reasoning_details` that are not a list")
        details = None
    pieces = [piece for detail in details or () if (piece := _from_detail(detail, lose)) is not None]
    if all(piece.redacted for piece in pieces):
        pieces = [*_from_texts(message, lose), *pieces]
    return [piece for piece in pieces if piece.content or piece.signature]


def reasoning_of_part(part: Mapping[str, Any], lose: Report) -> ThinkingData:
    """Converts a content part of type `thinking`: a string, or a list of text parts. Calls `lose` for other parts."""
    inner = part.get("thinking")
    inner = [{"text": inner}] if isinstance(inner, str) else inner
    parts = inner if isinstance(inner, list | tuple) else [None]
    texts = [one.get("text") if isinstance(one, Mapping) else None for one in parts]
    if not all(isinstance(text, str) for text in texts):
        lose("parts of reasoning that are not text")
    return ThinkingData("".join(text for text in texts if isinstance(text, str)))


def reasoning_to_message(pieces: Sequence[ThinkingData], field: ReasoningField | None = None) -> dict[str, Any]:
    """Returns the fields of an assistant message that contain the reasoning. The result is empty without reasoning.

    Args:
        pieces: Pieces of reasoning.
        field: Name of the field. `reasoning_content` and `reasoning` contain only readable text. Default:
            `reasoning_content`, or `reasoning_details` if a text cannot contain all information.
    """
    if field is None:
        is_plain = len(pieces) == 1 and pieces[0] == ThinkingData(pieces[0].content) and pieces[0].content
        field = "reasoning_content" if is_plain else "reasoning_details"
    if field == "reasoning_details":
        return {field: [_to_detail(piece) for piece in pieces]} if pieces else {}
    text = reasoning_text(pieces)
    return {field: text} if text else {}


def reasoning_text(pieces: Iterable[ThinkingData]) -> str:
    """Returns the readable reasoning as one text."""
    return "".join(piece.content for piece in pieces if not piece.redacted)


def _from_texts(message: Mapping[str, Any], lose: Report) -> list[ThinkingData]:
    """Returns the reasoning in the text fields. If both fields contain the same text, the result contains it once."""
    texts: dict[str, None] = {}
    for name in REASONING_FIELDS[:2]:
        if isinstance(text := message.get(name), str):
            texts[text] = None
        elif text is not None:
            lose(f"`{name}` that is not text")
    return [ThinkingData(text) for text in texts]


_DETAILS = {"reasoning.text": "text", "reasoning.summary": "summary", "reasoning.encrypted": "data"}
"""For each type of entry in `reasoning_details`, the field that contains the reasoning."""


def _from_detail(detail: Any, lose: Report) -> ThinkingData | None:
    kind = detail.get("type") if isinstance(detail, Mapping) else None
    field = _DETAILS.get(kind) if isinstance(kind, str) else None
    content, signature = (detail.get(field) or "", detail.get("signature")) if field is not None else (None, None)
    if not isinstance(content, str) or not isinstance(signature, str | None):
        lose(f"`reasoning_details` of type {shorten(kind)}")
        return None
    return ThinkingData(content, signature, redacted=kind == "reasoning.encrypted")


def _to_detail(piece: ThinkingData) -> dict[str, Any]:
    signature = {} if piece.signature is None else {"signature": piece.signature}
    if piece.redacted:
        return {"type": "reasoning.encrypted", "data": piece.content, **signature}
    return {"type": "reasoning.text", "text": piece.content, **signature}


class KnownReasoning:
    """Stores the reasoning of earlier responses, and adds it to messages that repeat these responses.

    A message repeats a response if it has the same text and tool calls. If several responses are equal, the
    last of them is matched with the last such message, and so on in reverse order.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[ThinkingData, ...]]] = defaultdict(list)

    def add(self, response: LLMResponse) -> None:
        """Stores the reasoning of a response, even if it is empty, so that equal responses are matched in order."""
        calls = [(call.id, call.name, call.arguments) for call in response.data if isinstance(call, ToolCallData)]
        self._known[_key(response.text, calls)].append(response.thinking)

    def add_message(self, message: Mapping[str, Any], pieces: Sequence[ThinkingData]) -> None:
        """Stores `pieces` as the reasoning of a response whose text and tool calls are in `message`."""
        self._known[_key(*_said(message))].append(tuple(pieces))

    def put_into(
        self,
        messages: Sequence[Mapping[str, Any]],
        write: Callable[[Mapping[str, Any], Sequence[ThinkingData]], Mapping[str, Any]],
    ) -> list[Mapping[str, Any]]:
        """Returns the messages, with reasoning added to each message that repeats a response.

        `write` gets a message and its reasoning, and returns the new message. Skips messages that have reasoning.
        """
        seen: dict[str, int] = defaultdict(int)
        made: list[Mapping[str, Any]] = []
        for message in reversed(messages):
            made.append(message)
            if message.get("role") != "assistant" or any(message.get(name) for name in REASONING_FIELDS):
                continue
            key = _key(*_said(message))
            known = self._known.get(key, ())
            seen[key] += 1
            if seen[key] <= len(known) and known[-seen[key]]:
                made[-1] = write(message, known[-seen[key]])
        return made[::-1]


def _said(message: Mapping[str, Any]) -> tuple[str, list[tuple[Any, Any, Any]]]:
    """Returns the text and the tool calls of an assistant message, to find the response with the same content."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list | tuple):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "".join(text for text in parts if isinstance(text, str))
    said = []
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            said.append((call.get("id"), function.get("name"), function.get("arguments")))
    return content if isinstance(content, str) else "", said


def _key(text: str, calls: Sequence[tuple[Any, Any, Any]]) -> str:
    return json.dumps([text, calls], default=str)


_SEAL = "ares-exp"


def seal(*pieces: ThinkingData) -> str:
    """Encodes reasoning as a *seal*: opaque base64 text that agents send back."""
    return b64encode(json.dumps([_SEAL, *map(piece_to_dict, pieces)]).encode()).decode()


def unsealed(opaque: str) -> list[ThinkingData] | None:
    """Decodes the reasoning in a seal. Returns `None` if `opaque` is not a seal."""
    try:
        mark, *data = parse_body(urlsafe_b64decode(opaque.replace("+", "-").replace("/", "_")))
        pieces = [piece_from_dict(one) for one in data]
    except (ValueError, TypeError, WireFormatError):
        return None
    are_valid = all(
        isinstance(one, ThinkingData) and isinstance(one.content, str) and isinstance(one.signature, str | None)
        for one in pieces
    )
    return [one for one in pieces if isinstance(one, ThinkingData)] if mark == _SEAL and are_valid else None
