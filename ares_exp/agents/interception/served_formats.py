"""The server side of three wire formats: OpenAI's Chat Completions and Responses, and Anthropic's Messages.

Each class reads the requests of agents in one format, and writes responses. `origin.dropped` lists the fields that an
`LLMRequest` does not support.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from ares_exp.agents.interception.served_wire import (
    Asked,
    Losses,
    Wire,
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
from ares_exp.llms import anthropic_messages, openai_chat, openai_responses
from ares_exp.llms.chat_messages import check_message
from ares_exp.llms.response import LLMResponse
from ares_exp.llms.wire import optional, required, shorten, typed

# Chat Completions


CHAT_SAMPLING = frozenset(
    {
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "top_a",
        "min_p",
        "typical_p",
        "n",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "length_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "reasoning_effort",
        "reasoning",
        "thinking",
        "thinking_budget",
        "enable_thinking",
        "preserve_thinking",
        "include_reasoning",
        "chat_template_kwargs",
        "verbosity",
        "service_tier",
        "parallel_tool_calls",
        "ignore_eos",
        "min_tokens",
        "prediction",
        "modalities",
    }
)
"""Request fields with sampling parameters and other options of the engine."""

_CACHE_MARK = "cache_control"


class ChatCompletionsWire(Wire):
    """OpenAI's Chat Completions API, which many other engines and clients also support.

    | in the request | result |
    |---|---|
    | `messages` | unchanged, without `cache_control`; leading system text becomes the system prompt |
    | `tools` of type function, `tool_choice`, `stop` | supported |
    | `reasoning_content`, `reasoning`, `reasoning_details` of messages | supported |
    | images, audio and files in messages | supported if the request contains their bytes, otherwise rejected |
    | `max_tokens`, `temperature`, `reasoning_effort` and similar fields (`CHAT_SAMPLING`) | `origin.sampling` |
    | `stream`, `stream_options.include_usage`, `model` | determine the format of the response |
    | `n` above 1 | rejected |
    | other tools, `response_format`, `metadata`, and all other fields | listed in `origin.dropped` |

    The response contains the reasoning as text in `reasoning_content`. If the reasoning consists of several texts,
    `reasoning_details` also contains these texts. Token ids, log-probabilities, costs and times are not sent to agents.
    """

    name = "chat_completions"
    path = "/v1/chat/completions"

    def read(self, body: Any) -> Asked:
        """Converts the body of a request to an `Asked`."""
        losses = Losses()
        rest, sampling = take(typed(body, "the request", Mapping), CHAT_SAMPLING)
        if sampling.get("n", 1) != 1:
            raise WireFormatError(f"Expected `n` to be 1, got {shorten(sampling['n'])}: a request has one response")
        rest, options = take(rest, ["stream_options"])
        stream_options = optional(options, "stream_options", Mapping) or {}
        messages = [_unmarked(check_message(message), losses) for message in required(rest, "messages", list)]
        rest = {**rest, "messages": messages, **_tools(rest, losses)}
        return make_asked(
            openai_chat.request_from_body(rest, strict=False, report=losses),
            wire=self.name,
            model=optional(body, "model", str),
            prefix="chatcmpl-",
            sampling=sampling,
            losses=losses,
            wants_usage=bool(optional(stream_options, "include_usage", bool)),
        )

    def whole(self, asked: Asked, response: LLMResponse) -> bytes:
        """Returns the response as one `chat.completion`."""
        return to_json(_completion(asked, response))

    def opening(self, asked: Asked) -> bytes:
        """Returns the first chunk, which contains the role."""
        return _chunk(asked, {"role": "assistant"})

    def keepalive(self, asked: Asked, number: int) -> bytes:
        """Returns a comment line of server-sent events, which clients ignore.

        No blank line follows the comment, because some clients would then try to parse an empty event.
        """
        return b": keepalive\n"

    def events(self, asked: Asked, response: LLMResponse, keepalives: int) -> Iterator[bytes]:
        """Yields chunks with the reasoning, text, tool calls, finish reason, usage if requested, and `[DONE]`."""
        completion = _completion(asked, response)
        (choice,) = completion["choices"]
        for delta in _message_deltas(choice["message"]):
            yield _chunk(asked, delta)
        yield _chunk(asked, {}, finish_reason=choice["finish_reason"])
        if asked.wants_usage:
            yield event(_envelope(asked) | {"choices": [], "usage": completion["usage"]})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, message: str) -> bytes:
        """Returns the JSON body of an error."""
        return to_json({"error": openai_error(status, message)})


def _tools(body: Mapping[str, Any], losses: Losses) -> dict[str, Any]:
    """Returns the tools that are functions, and `tool_choice`. Both are `None` without functions."""
    tools = []
    for tool in optional(body, "tools", list) or ():
        kind = optional(typed(tool, "tools[]", Mapping), "type", str) or "function"
        if kind == "function":
            required(required(tool, "function", Mapping), "name", str)
            tools.append({key: value for key, value in tool.items() if key != _CACHE_MARK})
        else:
            losses.add(f"tools[{kind}]")
    return {"tools": tools or None, "tool_choice": body.get("tool_choice") if tools else None}


def _unmarked(message: Mapping[str, Any], losses: Losses) -> Mapping[str, Any]:
    """Returns a message without the field `cache_control`, which only concerns the provider's prompt cache."""
    content = message.get("content")
    parts = [part for part in content if _CACHE_MARK in part] if isinstance(content, list) else []
    if not parts and _CACHE_MARK not in message:
        return message
    losses.add(_CACHE_MARK)
    bare = {key: value for key, value in message.items() if key != _CACHE_MARK}
    if isinstance(content, list):
        bare["content"] = [{key: value for key, value in part.items() if key != _CACHE_MARK} for part in content]
    return bare


def _completion(asked: Asked, response: LLMResponse) -> dict[str, Any]:
    return openai_chat.response_to_body(
        with_call_ids(asked, response), model=asked.model, response_id=asked.response_id, created=asked.created
    )


def _envelope(asked: Asked) -> dict[str, Any]:
    return {
        "id": asked.response_id,
        "object": "chat.completion.chunk",
        "created": asked.created,
        "model": asked.model,
    }


def _chunk(asked: Asked, delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return event(_envelope(asked) | {"choices": [choice]} | ({"usage": None} if asked.wants_usage else {}))


def _message_deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the deltas of a stream that together form a message. Its role is in the opening chunk."""
    for name in ("reasoning_content", "content", "refusal"):
        if isinstance(text := message.get(name), str):
            yield from ({name: part} for part in slices(text))
    if "reasoning_details" in message:
        yield {"reasoning_details": message["reasoning_details"]}  # one chunk: without an index they cannot be merged
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        head = {"name": function["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": head}]}
        for part in slices(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}


# Responses


RESPONSES_SAMPLING = frozenset(
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
    """OpenAI's Responses API.

    | in the request | result |
    |---|---|
    | `instructions`, `input`: messages, tool calls and their outputs | supported, see `llms.openai_responses`; \
leading messages of role system or developer become the system prompt |
    | `reasoning` items | reasoning of the message, verbatim |
    | tools: functions, custom ones, namespaces, `local_shell`; `additional_tools` items | functions for the policy; \
calls are returned in the tool's own format |
    | images and files | supported if the request contains their bytes, otherwise rejected |
    | `max_output_tokens`, `temperature`, `reasoning`, `text` and others (`RESPONSES_SAMPLING`) | `origin.sampling` |
    | `stream`, `model` | determine the format of the response |
    | `previous_response_id`, `conversation`, `prompt`, `item_reference`, `background` | rejected, because nothing is \
stored |
    | tools of the provider (`web_search`), `text.format`, `metadata`, ids, and all other fields | listed in \
`origin.dropped` |

    Clients close a stream that has had no events for some time, even if it has had comments. Keepalives are therefore
    `response.in_progress` events.
    """

    name = "responses"
    path = "/v1/responses"
    count_path: str | None = "/v1/responses/input_tokens"

    def read(self, body: Any) -> Asked:
        """Converts the body of a request to an `Asked`."""
        losses = Losses()
        rest, sampling = take(typed(body, "the request", Mapping), RESPONSES_SAMPLING)
        rest, options = take(rest, ["stream_options", "background"])
        if optional(options, "background", bool):
            raise WireFormatError("`background` is not supported. Leave it out.")
        text = optional(sampling, "text", Mapping) or {}
        if (optional(text, "format", Mapping) or {}).get("type", "text") != "text":
            losses.add("text.format")
        return make_asked(
            openai_responses.request_from_body(rest, strict=False, report=losses),
            wire=self.name,
            model=optional(body, "model", str),
            prefix="resp_",
            sampling=sampling,
            losses=losses,
            forms=openai_responses.tool_forms(rest),
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
                yield _numbered_event(kind, next(numbers), {"output_index": index, **fields})
        yield _numbered_event(f"response.{body['status']}", next(numbers), {"response": body})

    def count(self, body: Any) -> bytes | None:
        """Returns an estimate of the tokens of a request."""
        return to_json({"object": "response.input_tokens", "input_tokens": estimate_tokens(body)})

    def error(self, status: int, message: str) -> bytes:
        """Returns the JSON body of an error."""
        return to_json({"error": openai_error(status, message)})


def _response(asked: Asked, response: LLMResponse) -> dict[str, Any]:
    return openai_responses.response_to_body(
        with_call_ids(asked, response),
        model=asked.model,
        response_id=asked.response_id,
        created=asked.created,
        forms=asked.forms,
    )


def _numbered_event(kind: str, number: int, fields: Mapping[str, Any]) -> bytes:
    return event({"type": kind, "sequence_number": number, **fields}, kind)


def _lifecycle(asked: Asked, status: str, number: int) -> bytes:
    response = openai_responses.empty_response(asked.model, asked.response_id, asked.created)
    return _numbered_event(f"response.{status}", number, {"response": response})


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
        yield from _text_events("output_text", part["text"], {**at, "logprobs": []}, "text")
        yield "content_part.done", {**at, "part": part}
    elif item["type"] == "reasoning":
        for index, part in enumerate(item["summary"]):
            at = {"summary_index": index}
            yield "reasoning_summary_part.added", {**at, "part": {**part, "text": ""}}
            yield from _text_events("reasoning_summary_text", part["text"], at, "text")
            yield "reasoning_summary_part.done", {**at, "part": part}
    elif item["type"] == "function_call":
        yield from _text_events("function_call_arguments", item["arguments"], {}, "arguments", name=item["name"])
    elif item["type"] == "custom_tool_call":
        yield from _text_events("custom_tool_call_input", item["input"], {}, "input")


def _text_events(
    kind: str, text: str, at: Mapping[str, Any], field: str, **done: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in slices(text):
        yield f"{kind}.delta", {**at, "delta": part}
    yield f"{kind}.done", {**at, field: text, **done}


# Messages


MESSAGES_SAMPLING = frozenset(
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
    """Anthropic's Messages API.

    | in the request | result |
    |---|---|
    | `system`, `messages` (also of role system), `tools` with a schema, `tool_choice`, `stop_sequences` | supported, \
see `llms.anthropic_messages` |
    | `thinking` and `redacted_thinking` blocks | reasoning of the message, verbatim |
    | images and documents in messages and tool results | supported if the request has their bytes, otherwise rejected |
    | `max_tokens`, `temperature`, `thinking`, `output_config` and others (`MESSAGES_SAMPLING`) | `origin.sampling` |
    | `stream`, `model` | determine the format of the response |
    | tools of the provider (`web_search_…`), `cache_control`, `metadata`, `is_error`, and all other fields | \
listed in `origin.dropped` |

    All headers (`anthropic-version`, `anthropic-beta`) and query parameters are accepted.
    """

    name = "messages"
    path = "/v1/messages"
    count_path: str | None = "/v1/messages/count_tokens"

    def read(self, body: Any) -> Asked:
        """Converts the body of a request to an `Asked`."""
        losses = Losses()
        rest, sampling = take(typed(body, "the request", Mapping), MESSAGES_SAMPLING)
        if (optional(sampling, "output_config", Mapping) or {}).get("format"):
            losses.add("output_config.format")
        return make_asked(
            anthropic_messages.request_from_body(rest, strict=False, report=losses),
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
        return _typed_event({"type": "message_start", "message": message})

    def keepalive(self, asked: Asked, number: int) -> bytes:
        """Returns the event `ping`."""
        return _typed_event({"type": "ping"})

    def events(self, asked: Asked, response: LLMResponse, keepalives: int) -> Iterator[bytes]:
        """Yields the blocks in order, then `message_delta` with token counts and stop reason, then `message_stop`."""
        message = _message(asked, response)
        for index, block in enumerate(message["content"]):
            start, deltas = _block_parts(block)
            yield _typed_event({"type": "content_block_start", "index": index, "content_block": start})
            for delta in deltas:
                yield _typed_event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _typed_event({"type": "content_block_stop", "index": index})
        end = {key: message[key] for key in ("stop_reason", "stop_sequence", "stop_details")}
        yield _typed_event({"type": "message_delta", "delta": end, "usage": message["usage"]})
        yield _typed_event({"type": "message_stop"})

    def count(self, body: Any) -> bytes | None:
        """Returns an estimated token count of a request. Without it, agents would compact their history too early."""
        return to_json({"input_tokens": estimate_tokens(body)})

    def error(self, status: int, message: str) -> bytes:
        """Returns the JSON body of an error."""
        kind = _ERRORS.get(status, "api_error")
        return to_json({"type": "error", "error": {"type": kind, "message": message}})


def _message(asked: Asked, response: LLMResponse) -> dict[str, Any]:
    return anthropic_messages.response_to_body(
        with_call_ids(asked, response), model=asked.model, response_id=asked.response_id
    )


def _typed_event(value: Mapping[str, Any]) -> bytes:
    return event(value, value["type"])


def _block_parts(block: Mapping[str, Any]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    if block["type"] == "text":
        return {"type": "text", "text": ""}, _block_deltas("text_delta", "text", block["text"])
    if block["type"] == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}, _thinking(block)
    if block["type"] == "tool_use":
        given = to_json(block["input"]).decode()
        return {**block, "input": {}}, _block_deltas("input_json_delta", "partial_json", given)
    return dict(block), iter(())


def _thinking(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if block["thinking"]:
        yield from _block_deltas("thinking_delta", "thinking", block["thinking"])
    yield {"type": "signature_delta", "signature": block["signature"]}


def _block_deltas(kind: str, field: str, text: str) -> Iterator[dict[str, Any]]:
    for part in slices(text):
        yield {"type": kind, field: part}
