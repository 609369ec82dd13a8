"""Converters to and from the wire format of Anthropic's Messages API.

Format: https://platform.claude.com/docs/en/api/messages. Bodies are JSON-ready dicts. Messages of an `LLMRequest` are
in the chat-completions format (see `chat_messages`). As in `openai_chat`, no content is lost silently. Unsupported
content raises a `WireFormatError` that names the content. With `strict=False`, it is dropped with a warning.

| in this package | in the Messages API |
|---|---|
| `system_prompt` | `system`; blocks are joined by an empty line |
| messages of role system | the same within `messages`; leading system messages are moved to `system` |
| `tool_calls` | `tool_use`; arguments that are not a JSON object become `{"invalid_arguments": TEXT}` |
| messages of role tool | `tool_result` blocks at the start of a user message |
| reasoning with a signature | `thinking`, or `redacted_thinking` if redacted. Without a signature, responses contain \
a seal of this package (see `chat_messages.seal`), and requests omit the reasoning |
| images | `image`, from base64 data or a URL |
| files | `document`, from base64 data; text documents become text |
| `tools` | `tools` with an `input_schema`; tools of the provider are not supported |
| `tool_choice` | `auto`, `any` (required), `tool`, `none` |
| `max_output_tokens`, `stop_sequences` | `max_tokens`, `stop_sequences` |
| `usage.prompt_tokens` | sum of `input_tokens`, `cache_read_input_tokens` and `cache_creation_input_tokens` |
| `usage.reasoning_tokens` | `output_tokens_details.thinking_tokens` |

Not supported: `cache_control`, `citations`, `is_error`, the engine options `thinking` and `output_config`,
`context_management`, `container`, `mcp_servers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ares_exp.errors import MalformedResponseError, UnsendableRequestError
from ares_exp.llms.chat_messages import (
    arguments_of_input,
    assistant_message,
    calls_of,
    content_of,
    data_url,
    function_tool,
    image_part,
    input_of_arguments,
    reasoning_of_message,
    seal,
    split_data_url,
    split_system,
    text_part,
    tool_name,
    unsealed,
)
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Piece, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.llms.wire import (
    NUMBER,
    Report,
    ResponseStream,
    WireFormatError,
    check_keys,
    count_of,
    errors_as,
    list_of,
    on_loss,
    optional,
    plain,
    required,
    shorten,
    typed,
)

_REQUEST_KEYS = {
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_sequences",
    "stream",
    "metadata",
    "service_tier",
}
_RESPONSE_KEYS = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "stop_details", "usage"}
_TOOL_KEYS = {"type", "name", "description", "input_schema", "strict"}
_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal", "refusal": "refusal"}
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}


def request_from_body(body: Mapping[str, Any], *, strict: bool = True, report: Report | None = None) -> LLMRequest:
    """Converts the body of a request to an `LLMRequest`, without the model, which callers read from `body["model"]`.

    Raises:
        WireFormatError: `body` is malformed, or has a field that an `LLMRequest` cannot represent and `strict` is set.
    """
    lose = on_loss(strict, report)
    wired = required(typed(body, "the request", Mapping), "messages", list)
    messages = [message for one in wired for message in _messages(typed(one, "messages[]", Mapping), lose)]
    check_keys(body, _REQUEST_KEYS, "request", lose)
    tools = [tool for one in list_of(body, "tools", Mapping) or () if (tool := _tool(one, lose)) is not None]
    return LLMRequest(
        messages=messages,
        system_prompt=_system_prompt(body, lose),
        tools=tools or None,
        tool_choice=_tool_choice(body, lose) if tools else None,
        max_output_tokens=optional(body, "max_tokens", int),
        temperature=optional(body, "temperature", *NUMBER),
        top_p=optional(body, "top_p", *NUMBER),
        top_k=optional(body, "top_k", int),
        stop_sequences=list_of(body, "stop_sequences", str),
        stream=bool(optional(body, "stream", bool)),
        metadata=optional(body, "metadata", Mapping),
        service_tier=optional(body, "service_tier", str),
    )


def request_to_body(
    request: LLMRequest,
    *,
    model: str,
    max_tokens: int = 32_000,
    strict: bool = True,
    report: Report | None = None,
) -> dict[str, Any]:
    """Converts `request` to a body for `model`. Uses `max_tokens` if the request does not set `max_output_tokens`.

    Raises:
        UnsendableRequestError: `request` is malformed, or has unsupported content and `strict` is set.
    """
    lose = on_loss(strict, report, UnsendableRequestError)
    with errors_as(UnsendableRequestError):
        system, messages = split_system(request)
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": max_tokens if request.max_output_tokens is None else request.max_output_tokens,
            "messages": _wire_messages(messages, lose),
        }
        if system:
            body["system"] = system
        if request.tools:
            body["tools"] = [_wire_tool(tool, lose) for tool in request.tools]
            if (choice := request.tool_choice) is not None:
                named = {"type": "any" if choice == "required" else choice}
                body["tool_choice"] = named if isinstance(choice, str) else {"type": "tool", "name": tool_name(choice)}
        for name in ("temperature", "top_p", "top_k", "service_tier"):
            if (value := getattr(request, name)) is not None:
                body[name] = value
        if request.stop_sequences:
            body["stop_sequences"] = list(request.stop_sequences)
        if request.stream:
            body["stream"] = True
        check_keys(request.metadata or {}, {"user_id"}, "metadata", lose)
        if isinstance(user := (request.metadata or {}).get("user_id"), str):
            body["metadata"] = {"user_id": user}
        return body


def response_to_body(response: LLMResponse, *, model: str | None = None, response_id: str = "msg_0") -> dict[str, Any]:
    """Converts `response` to a body. If `model` is `None`, the body names the model that responded."""
    blocks = [block for piece in response.data if (block := _block_of_piece(piece)) is not None]
    is_call = any(isinstance(piece, ToolCallData) for piece in response.data)
    return {
        "id": response_id,
        "type": "message",
        "role": "assistant",
        "model": model or response.model or "",
        "content": blocks,
        "stop_reason": _STOP_REASONS.get(response.finish_reason or "", "tool_use" if is_call else "end_turn"),
        "stop_sequence": None,
        "stop_details": None,
        "usage": usage_to_wire(response.usage),
    }


def response_from_body(body: Any, *, strict: bool = True, report: Report | None = None) -> LLMResponse:
    """Converts the parsed body of a response to an `LLMResponse`.

    Raises:
        MalformedResponseError: `body` is not a message, or has a field that an `LLMResponse` cannot represent and
            `strict` is set.
    """
    lose = on_loss(strict, report)
    with errors_as(MalformedResponseError):
        body = typed(body, "the response", Mapping)
        blocks = _blocks(required(body, "content", list))
        check_keys(body, _RESPONSE_KEYS, "response", lose)
        reason = optional(body, "stop_reason", str)
        return LLMResponse(
            data=[piece for block in blocks if (piece := _piece_of_block(block, lose)) is not None],
            usage=_usage(optional(body, "usage", Mapping) or {}),
            finish_reason=_FINISH_REASONS.get(reason, reason) if reason else None,
            model=optional(body, "model", str) or None,
        )


def usage_to_wire(usage: Usage) -> dict[str, Any]:
    """Converts token counts to the API's `usage`. Its `input_tokens` exclude tokens read from or written to a cache."""
    fresh = usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens
    return {
        "input_tokens": max(0, fresh),
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


# Requests, from the API's format


def _system_prompt(body: Mapping[str, Any], lose: Report) -> str | None:
    system: str | list[Any] | None = optional(body, "system", str, list)
    if not isinstance(system, list):
        return system
    texts = [required(part, "text", str) for part in _parts(system, "system[]", lose) if part["type"] == "text"]
    return "\n\n".join(texts) if texts else None


def _messages(message: Mapping[str, Any], lose: Report) -> Iterator[dict[str, Any]]:
    """Converts a message of the API to messages of an `LLMRequest`. Each tool result becomes a separate message."""
    role = required(message, "role", str)
    content = required(message, "content", str, list)
    check_keys(message, {"role", "content", "id", "type"}, "message", lose)
    if role == "assistant":
        pieces = [piece for block in _blocks(content) if (piece := _piece_of_block(block, lose)) is not None]
        yield assistant_message(pieces)
    elif role in ("user", "system"):
        blocks = _blocks(content)
        yield from (_tool_message(block, lose) for block in blocks if block["type"] == "tool_result")
        parts = _parts([block for block in blocks if block["type"] != "tool_result"], "content[]", lose)
        if parts or not blocks:
            yield {"role": role, "content": content_of(parts)}
    else:
        raise WireFormatError(f"Expected `role` to be user, assistant or system, got {shorten(role)}")


def _blocks(content: Any) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [text_part(content)]
    blocks = [typed(block, "content[]", Mapping) for block in content]
    for block in blocks:
        required(block, "type", str)
    return blocks


def _tool_message(block: Mapping[str, Any], lose: Report) -> dict[str, Any]:
    check_keys(block, {"type", "tool_use_id", "content", "is_error"}, "tool result", lose)
    if optional(block, "is_error", bool):
        lose("`is_error` of a tool result")
    content = optional(block, "content", str, list)
    parts = _parts(_blocks(content or []), "content[]", lose)
    return {"role": "tool", "tool_call_id": required(block, "tool_use_id", str), "content": content_of(parts)}


def _parts(blocks: Sequence[Any], where: str, lose: Report) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for value in blocks:
        block = typed(value, where, Mapping)
        kind = required(block, "type", str)
        if kind == "text":
            check_keys(block, {"type", "text"}, "text block", lose)
            parts.append(text_part(required(block, "text", str)))
        elif kind in ("image", "document"):
            parts += _media(block, kind, lose)
        else:
            lose(f"`content[{kind}]`, a block that ares_exp does not support")
    return parts


def _media(block: Mapping[str, Any], kind: str, lose: Report) -> list[dict[str, Any]]:
    source = required(block, "source", Mapping)
    check_keys(block, {"type", "source", "title"}, f"{kind} block", lose)
    form = required(source, "type", str)
    if form == "text":
        return [text_part(required(source, "data", str))]
    if form == "content" and kind == "document":
        inner = required(source, "content", str, list)
        return _parts(_blocks(inner), "source.content[]", lose)
    if form == "base64":
        url = data_url(required(source, "media_type", str), required(source, "data", str))
    elif form == "url" and kind == "image":
        url = required(source, "url", str)
    else:
        raise WireFormatError(f"Expected the `source` of the {kind} to contain the data, got {shorten(source)}")
    if kind == "image":
        return [image_part(url)]
    return [{"type": "file", "file": {"filename": optional(block, "title", str) or "document", "file_data": url}}]


def _tool(tool: Mapping[str, Any], lose: Report) -> dict[str, Any] | None:
    kind = optional(tool, "type", str) or "custom"
    if kind != "custom":
        lose(f"`tools[{kind}]`, a built-in tool of the provider")
        return None
    check_keys(tool, _TOOL_KEYS, "tool", lose)
    return function_tool(
        required(tool, "name", str),
        optional(tool, "description", str),
        required(tool, "input_schema", Mapping),
        strict=optional(tool, "strict", bool) or None,
    )


def _tool_choice(body: Mapping[str, Any], lose: Report) -> str | dict[str, Any] | None:
    choice = optional(body, "tool_choice", Mapping)
    if choice is None:
        return None
    if choice.get("disable_parallel_tool_use"):
        lose("`disable_parallel_tool_use` of the tool choice")
    kind = required(choice, "type", str)
    if kind == "tool":
        return {"type": "function", "function": {"name": required(choice, "name", str)}}
    if kind not in ("auto", "any", "none"):
        raise WireFormatError(f"Expected `tool_choice` to be auto, any, tool or none, got {shorten(choice)}")
    return "required" if kind == "any" else kind


# Requests, to the API's format


def _wire_messages(messages: Sequence[Mapping[str, Any]], lose: Report) -> list[dict[str, Any]]:
    """Converts messages to the API's format. Consecutive tool results and user messages become one message."""
    made: list[dict[str, Any]] = []
    for message in messages:
        role = required(message, "role", str)
        if role == "assistant":
            wired, blocks = "assistant", _wire_assistant(message, lose)
        elif role == "tool":
            content = message.get("content")
            given = content if isinstance(content, str) else _wire_blocks(content, lose)
            answered = required(message, "tool_call_id", str)
            wired, blocks = "user", [{"type": "tool_result", "tool_use_id": answered, "content": given}]
        else:
            wired = "system" if role in ("system", "developer") else "user"
            blocks = _wire_blocks(message.get("content"), lose)
        if not blocks:
            continue  # the API does not allow empty messages
        if made and made[-1]["role"] == wired == "user":
            made[-1]["content"] += blocks
        else:
            made.append({"role": wired, "content": blocks})
    return made


def _wire_assistant(message: Mapping[str, Any], lose: Report) -> list[dict[str, Any]]:
    blocks = []
    for piece in reasoning_of_message(message, lose):
        if piece.signature or piece.redacted:
            blocks.append(_thinking_block(piece))
        else:
            lose("`reasoning` without a signature, which the provider would reject")
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    blocks += _wire_blocks([part for part in parts if part.get("type") != "thinking"] or content, lose)
    return blocks + [_tool_use(call) for call in calls_of(message)]


def _wire_blocks(content: Any, lose: Report) -> list[dict[str, Any]]:
    """Converts a message's content to blocks. Omits empty text blocks, which the API does not allow."""
    if not isinstance(content, list | tuple):
        return [text_part(content)] if content else []
    blocks: list[dict[str, Any]] = []
    for part in content:
        kind = required(part, "type", str)
        if kind in ("text", "refusal"):
            blocks += [text_part(required(part, kind, str))] if part[kind] else []
        elif kind == "image_url":
            blocks.append(_wire_image(required(part, "image_url", Mapping), lose))
        elif kind == "file":
            blocks.append(_wire_document(required(part, "file", Mapping)))
        else:
            lose(f"`content[{kind}]`, which the Messages API does not have")
    return blocks


def _wire_image(image: Mapping[str, Any], lose: Report) -> dict[str, Any]:
    url = required(image, "url", str)
    check_keys(image, {"url"} | ({"detail"} if image.get("detail") == "auto" else set()), "image", lose)
    data = split_data_url(url)
    source = {"type": "url", "url": url} if data is None else _base64_source(*data)
    return {"type": "image", "source": source}


def _wire_document(file: Mapping[str, Any]) -> dict[str, Any]:
    data = split_data_url(required(file, "file_data", str))
    if data is None:
        raise WireFormatError(f"Expected `file_data` to be a data: URL, got {shorten(file['file_data'])}")
    title = {"title": file["filename"]} if isinstance(file.get("filename"), str) else {}
    return {"type": "document", "source": _base64_source(*data), **title}


def _base64_source(media_type: str, data: str) -> dict[str, Any]:
    return {"type": "base64", "media_type": media_type, "data": data}


def _wire_tool(tool: Mapping[str, Any], lose: Report) -> dict[str, Any]:
    name, function = tool_name(tool), tool["function"]
    check_keys(function, {"name", "description", "parameters", "strict"}, "tool", lose)
    schema = plain(function.get("parameters")) or {"type": "object", "properties": {}}
    wired = {"name": name, "description": function.get("description"), "input_schema": schema}
    wired["strict"] = function.get("strict") or None
    return {key: value for key, value in wired.items() if value is not None}


# Pieces of responses, both ways


def _piece_of_block(block: Mapping[str, Any], lose: Report) -> Piece | None:
    kind = block["type"]
    if kind == "text":
        check_keys(block, {"type", "text"}, "text block", lose)
        return TextData(required(block, "text", str))
    if kind == "tool_use":
        check_keys(block, {"type", "id", "name", "input", "caller"}, "tool use", lose)
        arguments = arguments_of_input(required(block, "input", Mapping))
        return ToolCallData(required(block, "id", str), required(block, "name", str), arguments)
    if kind == "thinking":
        text, signature = required(block, "thinking", str), optional(block, "signature", str) or None
        return ThinkingData(text, signature if unsealed(signature or "") is None else None)
    if kind == "redacted_thinking":
        data = required(block, "data", str)
        sealed = unsealed(data)
        return sealed[0] if sealed else ThinkingData(data, redacted=True)
    lose(f"`content[{kind}]`, a block that ares_exp does not support")
    return None


def _block_of_piece(piece: Piece) -> dict[str, Any] | None:
    if isinstance(piece, TextData):
        return text_part(piece.content)
    if isinstance(piece, ThinkingData):
        return _thinking_block(piece) if piece.content or piece.signature else None
    return _tool_use(piece)


def _tool_use(call: ToolCallData) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input_of_arguments(call.arguments)}


def _thinking_block(piece: ThinkingData) -> dict[str, Any]:
    if piece.redacted:
        return {"type": "redacted_thinking", "data": seal(piece) if piece.signature else piece.content}
    return {"type": "thinking", "thinking": piece.content, "signature": piece.signature or seal()}


def _usage(usage: Mapping[str, Any]) -> Usage:
    read, written = count_of(usage, "cache_read_input_tokens"), count_of(usage, "cache_creation_input_tokens")
    details = usage.get("output_tokens_details")
    return Usage(
        prompt_tokens=count_of(usage, "input_tokens") + read + written,
        generated_tokens=count_of(usage, "output_tokens"),
        cached_tokens=read,
        cache_write_tokens=written,
        reasoning_tokens=count_of(details, "thinking_tokens") if isinstance(details, Mapping) else 0,
    )


_JOINED = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""For each type of delta in a stream, the field whose texts are concatenated."""


class StreamedMessage(ResponseStream):
    """Assembles a streamed response of the Messages API from its events."""

    def __init__(self) -> None:
        super().__init__()
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, _Block] = {}

    @property
    def may_end(self) -> bool:
        """Whether the event `message_stop` has been received, or an event with an error."""
        return self.is_complete and bool(self._message or self._error)

    def read(self, event: Mapping[str, Any]) -> None:
        """Adds one event to the message."""
        kind = required(event, "type", str)
        if kind == "error":
            self.fail(event.get("error") or "no reason given")
        elif kind == "message_start":
            self._message = dict(required(event, "message", Mapping))
        elif kind == "content_block_start":
            self._blocks[required(event, "index", int)] = _Block(required(event, "content_block", Mapping))
        elif kind == "content_block_delta":
            index = required(event, "index", int)
            self._blocks.setdefault(index, _Block({})).read(required(event, "delta", Mapping))
        elif kind == "message_delta":
            self._message |= optional(event, "delta", Mapping) or {}
            counts = optional(event, "usage", Mapping) or {}
            known = optional(self._message, "usage", Mapping) or {}
            self._message["usage"] = {**known, **{key: count for key, count in counts.items() if count is not None}}
        elif kind == "message_stop":
            self.is_complete = True

    def assembled(self) -> dict[str, Any]:
        """Returns the response body that results from the events so far."""
        return {**self._message, "content": [block.assembled() for _, block in sorted(self._blocks.items())]}


class _Block:
    def __init__(self, start: Mapping[str, Any]) -> None:
        self._start = start
        self._joined: dict[str, list[str]] = {}
        self._others: dict[str, list[Any]] = {}

    def read(self, delta: Mapping[str, Any]) -> None:
        kind = required(delta, "type", str)
        if (field := _JOINED.get(kind)) is not None:
            self._joined.setdefault(field, []).append(required(delta, field, str))
        else:
            self._others.setdefault(kind, []).append(delta)

    def assembled(self) -> dict[str, Any]:
        joined = {field: "".join(parts) for field, parts in self._joined.items()}
        given = joined.pop("partial_json", "")
        block = {**self._start, **self._others}
        for field, text in joined.items():
            block[field] = f"{self._start.get(field) or ''}{text}"
        return {**block, "input": input_of_arguments(given)} if given else block
