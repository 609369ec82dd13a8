"""The server side of the chat-completions wire format, which reads requests of agents and writes responses.

| in the request | result |
|---|---|
| `messages` | unchanged, without `cache_control`; leading system text becomes the system prompt |
| `tools` of type function, `tool_choice`, `stop` | supported |
| `reasoning_content`, `reasoning`, `reasoning_details` of messages | supported |
| images, audio and files in messages | supported if the request contains their bytes, otherwise rejected |
| `max_tokens`, `temperature`, `reasoning_effort` and similar fields (`SAMPLING`) | `origin.sampling` |
| `stream`, `stream_options.include_usage`, `model` | determine the format of the response |
| `n` above 1 | rejected |
| other tools, `response_format`, `metadata`, and all other fields | listed in `origin.dropped` |

The response contains the reasoning as text in `reasoning_content`. If the reasoning consists of several texts,
`reasoning_details` also contains these texts. Token ids, log-probabilities, costs and times are not sent to agents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ares_exp.agents.interception.served_wire import (
    Asked,
    Losses,
    Wire,
    event,
    make_asked,
    openai_error,
    slices,
    take,
    to_json,
    with_call_ids,
)
from ares_exp.errors import WireFormatError
from ares_exp.llms.chat_messages import check_message
from ares_exp.llms.openai_chat import request_from_body, response_to_body
from ares_exp.llms.response import LLMResponse
from ares_exp.llms.wire import optional, required, shorten, typed

SAMPLING = frozenset(
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
    """OpenAI's Chat Completions API, which many other engines and clients also support."""

    name = "chat_completions"
    path = "/v1/chat/completions"

    def read(self, body: Any) -> Asked:
        """Converts the body of a request to an `Asked`."""
        losses = Losses()
        rest, sampling = take(typed(body, "the request", Mapping), SAMPLING)
        if sampling.get("n", 1) != 1:
            raise WireFormatError(f"Expected `n` to be 1, got {shorten(sampling['n'])}: a request has one response")
        rest, options = take(rest, ["stream_options"])
        stream_options = optional(options, "stream_options", Mapping) or {}
        messages = [_unmarked(check_message(message), losses) for message in required(rest, "messages", list)]
        rest = {**rest, "messages": messages, **_tools(rest, losses)}
        return make_asked(
            request_from_body(rest, strict=False, report=losses),
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
        for delta in _deltas(choice["message"]):
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
    return response_to_body(
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


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
