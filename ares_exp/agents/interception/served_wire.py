"""The contract of a wire format from the server's side, and what all formats need to write bodies and events."""

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
    """One request as an agent's client sent it.

    Attributes:
        request: The request, with its `origin` (but for the conversation, which the wire does not know).
        streamed: Whether the response is to be a stream of events.
        model: The name of the model that was asked for; the response repeats it.
        response_id: The id of the response, made up when the request was read.
        created: Epoch seconds at which the request was read.
        wants_usage: Whether a stream is to end with token counts, where the wire leaves that to the client.
        forms: How calls of tools that are no plain functions are written, by the names that the policy sees.
    """

    request: LLMRequest
    streamed: bool
    model: str
    response_id: str
    created: int
    wants_usage: bool = True
    forms: Mapping[str, ToolForm] = field(default_factory=dict)


class Wire(Protocol):
    """One wire format. Stateless: everything that a response needs to know of its request is in `Asked`.

    Attributes:
        name: `"chat_completions"`, `"responses"` or `"messages"`.
        path: The path of its requests below the endpoint, such as `/v1/messages`.
        count_path: The path of requests for `count`; `None` where the wire has none.
        content_type: Of a stream.
    """

    name: str
    path: str
    count_path: str | None
    content_type: str

    def key(self, headers: Mapping[str, str]) -> str | None:
        """Finds the client's key in the headers (their names compare without case), or `None`."""
        ...

    def read(self, body: Any, headers: Mapping[str, str]) -> Asked:
        """Reads a JSON body as `parse_body` gives it.

        What the body has and an `LLMRequest` cannot hold is named in `request.origin.dropped`.

        Raises:
            WireFormatError: It is malformed, or has what cannot be left out; the endpoint answers 400 with the text.
        """
        ...

    def whole(self, asked: Asked, response: LLMResponse) -> bytes:
        """Writes the whole response: a JSON body."""
        ...

    def opening(self, asked: Asked) -> bytes:
        """Writes the events that a stream starts with, before there is a response."""
        ...

    def keepalive(self, asked: Asked, number: int) -> bytes:
        """Writes what keeps a client from giving up while there is no response yet; `number` counts from 1."""
        ...

    def events(self, asked: Asked, response: LLMResponse, keepalives: int) -> Iterator[bytes]:
        """Writes the response as events that go on from `opening` and as many `keepalives`.

        The last item ends the response for the client, and is to be sent only when the response is on record.
        """
        ...

    def count(self, body: Any) -> bytes | None:
        """Answers a request for the number of tokens of a body, with an estimate; `None` without a `count_path`.

        Raises:
            WireFormatError: It is no object.
        """
        ...

    def error(self, status: int, message: str) -> bytes:
        """Writes a JSON error body in the wire's own shape."""
        ...

    def error_event(self, asked: Asked, message: str, keepalives: int) -> bytes:
        """Writes the events that end a stream with an error."""
        ...


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
    """Returns the response with ids that its tool calls share with no other of the conversation.

    Agents find the result of a call by its id; policies may leave it empty, or start to count anew in each response.
    The same answer to the same conversation gets the same ids.
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
