"""The interface of a wire format's server side, and functions to read requests and write responses."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from ares_exp.errors import WireFormatError
from ares_exp.llms.chat_messages import parts_of, split_system
from ares_exp.llms.openai_responses import ToolForm
from ares_exp.llms.request import LLMRequest, Origin, freeze
from ares_exp.llms.response import LLMResponse, ToolCallData
from ares_exp.llms.wire import shorten, typed


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


# Requests


_NAME = re.compile(r"`([^`]+)`")


class Losses(set[str]):
    """The names of body fields that are dropped because an `LLMRequest` cannot represent them.

    An instance can be passed as the `report` argument of a function that converts a body to a request.
    """

    def __call__(self, text: str) -> None:
        """Adds the field that the warning `text` names in backquotes."""
        found = _NAME.search(text)
        self.add(found[1] if found else text)


def take(body: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a body into the fields outside of `names` and the non-empty fields in `names`."""
    wanted = frozenset(names)
    rest = {key: value for key, value in body.items() if key not in wanted}
    return rest, {key: body[key] for key in body if key in wanted and body[key] not in (None, [], {}, "")}


def make_asked(
    request: LLMRequest,
    *,
    wire: str,
    model: str | None,
    prefix: str,
    sampling: Mapping[str, Any],
    losses: Losses,
    wants_usage: bool = True,
    forms: Mapping[str, ToolForm] | None = None,
) -> Asked:
    """Creates an `Asked` from a request and the values that a wire has read. The response's id starts with `prefix`.

    Raises:
        WireFormatError: The request contains only the URL of some media, not their bytes.
    """
    _refuse_remote_media(request)
    if request.metadata:
        losses.add("metadata")
    system_prompt, messages = split_system(request)
    origin = Origin(wire, model=model or "", sampling=freeze(sampling), dropped=tuple(sorted(losses)))
    return Asked(
        request=replace(request, messages=messages, system_prompt=system_prompt, metadata=None, origin=origin),
        streamed=request.stream,
        model=model or "",
        response_id=f"{prefix}{uuid.uuid4().hex}",
        created=int(time.time()),
        wants_usage=wants_usage,
        forms=forms or {},
    )


def _refuse_remote_media(request: LLMRequest) -> None:
    """Rejects media with a remote URL, because fetching it would bypass the network policy of the agent's container."""
    for message in request.messages:
        for part in parts_of(message):
            kind = part.get("type")
            value = part.get(kind) if isinstance(kind, str) else None
            if kind in ("image_url", "video_url", "audio_url"):
                url = value.get("url") if isinstance(value, Mapping) else value
                if not (isinstance(url, str) and url.startswith("data:")):
                    raise WireFormatError(
                        f"Expected `{kind}` to be a data: URL, got {shorten(url)}. Remote media are not "
                        "supported: embed the data."
                    )
            elif kind == "file" and not (isinstance(value, Mapping) and isinstance(value.get("file_data"), str)):
                raise WireFormatError(
                    f"Expected `file` to contain `file_data`, got {shorten(value)}. Remote files are not supported: "
                    "embed the data."
                )


def estimate_tokens(body: Any) -> int:
    """Estimates the number of tokens in a request body: one per four characters, and 1600 for each media file.

    Raises:
        WireFormatError: The body is not a JSON object.
    """
    return max(1, _characters(typed(body, "the request", Mapping)) // CHARS_PER_TOKEN)


CHARS_PER_TOKEN = 4
MEDIA_CHARS = 1600 * CHARS_PER_TOKEN
_DATA_CHARS = 20_000
"""Length above which `estimate_tokens` takes a text without spaces for an encoded media file."""


def _characters(value: Any) -> int:
    if isinstance(value, str):
        is_media = len(value) > _DATA_CHARS and " " not in value[:_DATA_CHARS]
        return MEDIA_CHARS if is_media else len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _characters(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 4


# Responses


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


_OPENAI_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def openai_error(status: int, message: str) -> dict[str, str | None]:
    """Returns the JSON object for an error of OpenAI's APIs.

    For status 400, `param` is the first name in backticks in the message.
    """
    field = _NAME.search(message) if status == 400 else None
    return {
        "message": message,
        "type": _OPENAI_ERRORS.get(status, "server_error"),
        "param": field[1] if field else None,
        "code": None,
    }


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
