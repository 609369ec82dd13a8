"""The server side of the wire format of OpenAI's Responses API.

| in the request | result |
|---|---|
| `instructions`, `input`: messages, tool calls and their outputs | supported, see `llms.openai_responses`; leading \
messages of role system or developer become the system prompt |
| `reasoning` items | reasoning of the message, verbatim |
| tools: functions, custom ones, namespaces, `local_shell`; `additional_tools` items | functions for the policy; calls \
are returned in the tool's own format |
| images and files | supported if the request contains their bytes, otherwise rejected |
| `max_output_tokens`, `temperature`, `reasoning`, `text` and similar fields (`SAMPLING`) | `origin.sampling` |
| `stream`, `model` | determine the format of the response |
| `previous_response_id`, `conversation`, `prompt`, `item_reference`, `background` | rejected, because nothing is \
stored |
| tools of the provider (`web_search`), `text.format`, `metadata`, ids, and all other fields | listed in \
`origin.dropped` |

Clients close a stream that has had no events for some time, even if it has had comments. Keepalives are therefore
`response.in_progress` events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from ares_exp.agents.interception.served_wire import (
    Asked,
    Losses,
    estimate_tokens,
    event,
    make_asked,
    openai_error,
    slices,
    take,
    to_json,
    with_call_ids,
)
from ares_exp.errors import WireFormatError
from ares_exp.llms.openai_responses import empty_response, request_from_body, response_to_body
from ares_exp.llms.response import LLMResponse
from ares_exp.llms.responses_tools import tool_forms
from ares_exp.llms.wire import optional, typed

SAMPLING = frozenset(
    {
        "max_output_tokens",
        "max_tool_calls",
        "temperature",
        "top_p",
        "top_logprobs",
        "reasoning",
        "text",
        "parallel_tool_calls",
        "service_tier",
        "truncation",
    }
)
"""Request fields with sampling parameters and other options of the engine."""

_OPENING_EVENTS = 2


class ResponsesWire:
    """OpenAI's Responses API."""

    name = "responses"
    path = "/v1/responses"
    count_path: str | None = "/v1/responses/input_tokens"

    def read(self, body: Any) -> Asked:
        """Converts the body of a request to an `Asked`."""
        losses = Losses()
        rest, sampling = take(typed(body, "the request", Mapping), SAMPLING)
        rest, options = take(rest, ["stream_options", "background"])
        if optional(options, "background", bool):
            raise WireFormatError("`background` is not supported. Leave it out.")
        text = optional(sampling, "text", Mapping) or {}
        if (optional(text, "format", Mapping) or {}).get("type", "text") != "text":
            losses.add("text.format")
        return make_asked(
            request_from_body(rest, strict=False, report=losses),
            wire=self.name,
            model=optional(body, "model", str),
            prefix="resp_",
            sampling=sampling,
            losses=losses,
            forms=tool_forms(rest),
        )

    def whole(self, asked: Asked, response: LLMResponse) -> bytes:
        """Returns the response as one `response` object."""
        return to_json(_response(asked, response))

    def opening(self, asked: Asked) -> bytes:
        """Returns the events `response.created` and `response.in_progress`."""
        return _lifecycle(asked, "created", 0) + _lifecycle(asked, "in_progress", 1)

    def keepalive(self, asked: Asked, number: int) -> bytes:
        """Returns another event `response.in_progress`."""
        return _lifecycle(asked, "in_progress", _OPENING_EVENTS - 1 + number)

    def events(self, asked: Asked, response: LLMResponse, keepalives: int) -> Iterator[bytes]:
        """Yields the events of each item, then `response.completed` or `response.incomplete` with all items."""
        numbers = count(_OPENING_EVENTS + keepalives)
        body = _response(asked, response)
        for index, item in enumerate(body["output"]):
            for kind, fields in _item_events(item):
                yield _event(kind, next(numbers), {"output_index": index, **fields})
        yield _event(f"response.{body['status']}", next(numbers), {"response": body})

    def count(self, body: Any) -> bytes | None:
        """Returns an estimate of the tokens of a request."""
        return to_json({"object": "response.input_tokens", "input_tokens": estimate_tokens(body)})

    def error(self, status: int, message: str) -> bytes:
        """Returns the JSON body of an error."""
        return to_json({"error": openai_error(status, message)})


def _response(asked: Asked, response: LLMResponse) -> dict[str, Any]:
    return response_to_body(
        with_call_ids(asked, response),
        model=asked.model,
        response_id=asked.response_id,
        created=asked.created,
        forms=asked.forms,
    )


def _event(kind: str, number: int, fields: Mapping[str, Any]) -> bytes:
    return event({"type": kind, "sequence_number": number, **fields}, kind)


def _lifecycle(asked: Asked, status: str, number: int) -> bytes:
    response = empty_response(asked.model, asked.response_id, asked.created)
    return _event(f"response.{status}", number, {"response": response})


def _item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    started = {**item, **{name: type(item[name])() for name in ("arguments", "input", "summary") if name in item}}
    if item["type"] == "message":
        started["content"] = []
    if "status" in item:
        started["status"] = "in_progress"
    yield "response.output_item.added", {"item": started}
    for kind, fields in _content_events(item):
        yield f"response.{kind}", {"item_id": item["id"], **fields}
    yield "response.output_item.done", {"item": item}


def _content_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if item["type"] == "message":
        (part,) = item["content"]
        at = {"content_index": 0}
        yield "content_part.added", {**at, "part": {**part, "text": ""}}
        yield from _text("output_text", part["text"], {**at, "logprobs": []}, "text")
        yield "content_part.done", {**at, "part": part}
    elif item["type"] == "reasoning":
        for index, part in enumerate(item["summary"]):
            at = {"summary_index": index}
            yield "reasoning_summary_part.added", {**at, "part": {**part, "text": ""}}
            yield from _text("reasoning_summary_text", part["text"], at, "text")
            yield "reasoning_summary_part.done", {**at, "part": part}
    elif item["type"] == "function_call":
        yield from _text("function_call_arguments", item["arguments"], {}, "arguments", name=item["name"])
    elif item["type"] == "custom_tool_call":
        yield from _text("custom_tool_call_input", item["input"], {}, "input")


def _text(kind: str, text: str, at: Mapping[str, Any], field: str, **done: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in slices(text):
        yield f"{kind}.delta", {**at, "delta": part}
    yield f"{kind}.done", {**at, field: text, **done}
