"""The server side of the wire format of Anthropic's Messages API.

| in the request | result |
|---|---|
| `system`, `messages` (also of role system), `tools` with a schema, `tool_choice`, `stop_sequences` | supported, see \
`llms.anthropic_messages` |
| `thinking` and `redacted_thinking` blocks | reasoning of the message, verbatim |
| images and documents in messages and tool results | supported if the request has their bytes, otherwise rejected |
| `max_tokens`, `temperature`, `thinking`, `output_config` and similar fields (`SAMPLING`) | `origin.sampling` |
| `stream`, `model` | determine the format of the response |
| tools of the provider (`web_search_…`), `cache_control`, `metadata`, `is_error`, and all other fields | listed in \
`origin.dropped` |

All headers (`anthropic-version`, `anthropic-beta`) and query parameters are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ares_exp.agents.interception.served_wire import (
    Asked,
    Losses,
    estimate_tokens,
    event,
    make_asked,
    slices,
    take,
    to_json,
    with_call_ids,
)
from ares_exp.llms.anthropic_messages import request_from_body, response_to_body
from ares_exp.llms.response import LLMResponse
from ares_exp.llms.wire import optional, typed

SAMPLING = frozenset(
    {"max_tokens", "temperature", "top_p", "top_k", "thinking", "output_config", "service_tier", "speed"}
)
"""Request fields with sampling parameters and other options of the engine."""

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class MessagesWire:
    """Anthropic's Messages API."""

    name = "messages"
    path = "/v1/messages"
    count_path: str | None = "/v1/messages/count_tokens"

    def read(self, body: Any) -> Asked:
        """Converts the body of a request to an `Asked`."""
        losses = Losses()
        rest, sampling = take(typed(body, "the request", Mapping), SAMPLING)
        if (optional(sampling, "output_config", Mapping) or {}).get("format"):
            losses.add("output_config.format")
        return make_asked(
            request_from_body(rest, strict=False, report=losses),
            wire=self.name,
            model=optional(body, "model", str),
            prefix="msg_",
            sampling=sampling,
            losses=losses,
        )

    def whole(self, asked: Asked, response: LLMResponse) -> bytes:
        """Returns the response as one `message`."""
        return to_json(_message(asked, response))

    def opening(self, asked: Asked) -> bytes:
        """Returns the event `message_start`. Its token counts are preliminary; the last event has the final counts."""
        message = _message(asked, LLMResponse([])) | {"stop_reason": None}
        return _event({"type": "message_start", "message": message})

    def keepalive(self, asked: Asked, number: int) -> bytes:
        """Returns the event `ping`."""
        return _event({"type": "ping"})

    def events(self, asked: Asked, response: LLMResponse, keepalives: int) -> Iterator[bytes]:
        """Yields the blocks in order, then `message_delta` with token counts and stop reason, then `message_stop`."""
        message = _message(asked, response)
        for index, block in enumerate(message["content"]):
            start, deltas = _parts(block)
            yield _event({"type": "content_block_start", "index": index, "content_block": start})
            for delta in deltas:
                yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        end = {key: message[key] for key in ("stop_reason", "stop_sequence", "stop_details")}
        yield _event({"type": "message_delta", "delta": end, "usage": message["usage"]})
        yield _event({"type": "message_stop"})

    def count(self, body: Any) -> bytes | None:
        """Returns an estimated token count of a request. Without it, agents would compact their history too early."""
        return to_json({"input_tokens": estimate_tokens(body)})

    def error(self, status: int, message: str) -> bytes:
        """Returns the JSON body of an error."""
        kind = _ERRORS.get(status, "api_error")
        return to_json({"type": "error", "error": {"type": kind, "message": message}})


def _message(asked: Asked, response: LLMResponse) -> dict[str, Any]:
    return response_to_body(with_call_ids(asked, response), model=asked.model, response_id=asked.response_id)


def _event(value: Mapping[str, Any]) -> bytes:
    return event(value, value["type"])


def _parts(block: Mapping[str, Any]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    if block["type"] == "text":
        return {"type": "text", "text": ""}, _deltas("text_delta", "text", block["text"])
    if block["type"] == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}, _thinking(block)
    if block["type"] == "tool_use":
        given = to_json(block["input"]).decode()
        return {**block, "input": {}}, _deltas("input_json_delta", "partial_json", given)
    return dict(block), iter(())


def _thinking(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if block["thinking"]:
        yield from _deltas("thinking_delta", "thinking", block["thinking"])
    yield {"type": "signature_delta", "signature": block["signature"]}


def _deltas(kind: str, field: str, text: str) -> Iterator[dict[str, Any]]:
    for part in slices(text):
        yield {"type": kind, field: part}
