"""The interface of a wire format's server side, and helpers to write response bodies and events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, ToolCallData
from ares_exp.llms.responses_tools import ToolForm


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as sent by an agent's client.

    Attributes:
        request: Converted request. Its `origin` is complete except for the conversation.
        streamed: Whether to send the response as a stream of server-sent events.
        model: Requested model name, which the response repeats.
        response_id: Id of the response, created when the request was read.
        created: Time at which the request was read, in epoch seconds.
        wants_usage: Whether the client wants token counts at the end of a stream. Always `True`, except in the
            chat-completions format.
        is_list: Whether a response that is not streamed is sent as a list with one item.
        forms: Name of a special tool in `request` → format in which the response contains calls to this tool.
    """

    request: LLMRequest
    streamed: bool
    model: str
    response_id: str
    created: int
    wants_usage: bool = True
    is_list: bool = False
    forms: Mapping[str, ToolForm] = field(default_factory=dict)


class Wire(Protocol):
    """The server side of one wire format, such as OpenAI's Responses API: reads requests, and writes responses.

    A wire has no state. `Asked` contains everything about a request that is needed to write its response.

    Attributes:
        name: `"chat_completions"`, `"responses"`, `"messages"` or `"generate_content"`.
        path: URL path of LLM requests, such as `/v1/messages`.
        count_path: URL path of requests for token counts; `None` if the wire has no such requests.
    """

    name: str
    path: str
    count_path: str | None = None

    def read(self, body: Any) -> Asked:
        """Converts a JSON body to an `Asked`. `request.origin.dropped` lists fields that `LLMRequest` does not support.

        Raises:
            WireFormatError: The body is malformed, or has an unsupported field that cannot be dropped.
        """

    def whole(self, asked: Asked, response: LLMResponse) -> bytes:
        """Returns the complete response as a JSON body."""

    def opening(self, asked: Asked) -> bytes:
        """Returns the events that start a stream, before the response is available."""

    def keepalive(self, asked: Asked, number: int) -> bytes:
        """Returns a stream's keepalive, which prevents a timeout of the client. The first keepalive has `number` 1."""

    def events(self, asked: Asked, response: LLMResponse, keepalives: int) -> Iterator[bytes]:
        """Yields the events of the response. `keepalives` is the number of keepalives that were sent before.

        With the last event, the client has the complete response. Send it only after the response was recorded.
        """

    def count(self, body: Any) -> bytes | None:
        """Returns an estimated token count for a body, or `None` if the wire has no `count_path`.

        Raises:
            WireFormatError: The body is not a JSON object.
        """
        return None

    def error(self, status: int, message: str) -> bytes:
        """Returns a JSON error body in the format of the wire."""


DELTA_CHARS = 16_384
"""Maximum length of a text in one event. Longer texts are sent in several events, because some clients limit lines."""


def to_json(value: Any) -> bytes:
    """Returns compact JSON. It is ASCII, so that unpaired surrogates in a model's text remain as escapes."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def event(value: Any, name: str | None = None) -> bytes:
    """Returns one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


def slices(text: str) -> Iterator[str]:
    """Yields a text in pieces of at most `DELTA_CHARS` characters. An empty text is one piece."""
    yield text[:DELTA_CHARS]
    for start in range(DELTA_CHARS, len(text), DELTA_CHARS):
        yield text[start : start + DELTA_CHARS]


def with_call_ids(asked: Asked, response: LLMResponse) -> LLMResponse:
    """Returns the response with tool call ids that are unique in the conversation.

    Agents use the ids to match results to calls, but a policy may send no ids, or restart its numbering in each
    response. The new ids depend only on the conversation and the response.
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
                # The id is not derived from another id, because Claude Code treats `X_2` as a copy of `X` and loses its
                # result.
                free = next(name for number in count(len(used)) if (name := f"call-{number}") not in used)
                piece = replace(piece, id=free)
            used.add(piece.id)
        data.append(piece)
    return replace(response, data=data)
