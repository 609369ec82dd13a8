"""Converters to and from the wire format of OpenAI's Responses API.

Format: https://platform.openai.com/docs/api-reference/responses. Bodies are JSON-ready dicts. Messages of an
`LLMRequest` are in the chat-completions format (see `chat_messages`). As in `openai_chat`, no content is lost silently.
Unsupported content raises a `WireFormatError` that names the content. With `strict=False`, it is dropped with a
warning.

| in this package | in the Responses API |
|---|---|
| `system_prompt` | `instructions` |
| messages | items of type `message`; adjacent items of the assistant become one message |
| `tool_calls` | `function_call`, `custom_tool_call`, `local_shell_call` (see below) |
| messages of role tool | `function_call_output` and similar items |
| user messages | also `agent_message`, which Codex sends from one agent to another |
| reasoning | `reasoning`: the text as its summary (also read from its content), the signature or the redacted form as \
`encrypted_content`. If there is neither, responses contain a seal of this package (see `chat_messages.seal`) |
| images, files | `input_image`, `input_file` with their bytes, or with a URL |
| `tools`, `tool_choice` | see below |
| `max_output_tokens` | the same; `stop_sequences` and `top_k` are not supported |
| `finish_reason` | `status` and `incomplete_details` |
| `usage.cached_tokens`, `cache_write_tokens` | `usage.input_tokens_details` |
| `usage.reasoning_tokens` | `usage.output_tokens_details` |

References to content that the provider stores (`previous_response_id`, `conversation`, `prompt`, items of type
`item_reference`) are always rejected, because the request is incomplete without this content. Not supported: calls of
the provider's tools, `compaction`, the engine options `text`, `reasoning` and `parallel_tool_calls`, and `phase` of
messages.

| tool in the Responses API | in the chat-completions format |
|---|---|
| `function` | the same |
| `custom`, with free text as input and an optional grammar | a function with one argument `input`; the grammar is in \
its description |
| `namespace`, a group of functions and custom tools | functions named `NAMESPACE__NAME` |
| `local_shell`, with commands as lists of words | a function `local_shell` |
| other tools, which are the provider's | not supported |

In the Responses API, each kind of tool has its own format of calls. `tool_forms` returns the formats for the tools of a
request, and `call_item` uses them to convert the model's calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ares_exp.errors import MalformedResponseError, UnsendableRequestError
from ares_exp.llms.chat_messages import (
    arguments_object,
    assistant_message,
    calls_of,
    content_of,
    function_tool,
    image_part,
    reasoning_of_message,
    seal,
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

_KEPT_BY_PROVIDER = ("previous_response_id", "conversation", "prompt")
_REQUEST_KEYS = {
    "model",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "max_output_tokens",
    "temperature",
    "top_p",
    "stream",
    "metadata",
    "service_tier",
    "store",
    "include",
}
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_MESSAGE_KEYS = {"type", "id", "role", "content", "status"}
_OUTPUT_KEYS = {"type", "id", "call_id", "output", "status", "name", "namespace"}
_REASONING_KEYS = {"type", "id", "summary", "content", "encrypted_content", "status"}
_INCLUDED = "reasoning.encrypted_content"


def request_from_body(body: Mapping[str, Any], *, strict: bool = True, report: Report | None = None) -> LLMRequest:
    """Converts the body of a request to an `LLMRequest`.

    An `LLMRequest` contains neither the model nor the formats of tool calls. Callers read them from `body["model"]` and
    `tool_forms(body)`.

    Raises:
        WireFormatError: `body` is malformed, refers to content stored by the provider, or has a field that an
            `LLMRequest` cannot represent and `strict` is set.
    """
    lose = on_loss(strict, report)
    given = required(typed(body, "the request", Mapping), "input", str, list)
    for name in _KEPT_BY_PROVIDER:
        if body.get(name) not in (None, "", {}):
            raise WireFormatError(
                f"`{name}` is not supported, because nothing is stored here. Send the whole `input`, with "
                "`store: false`."
            )
    items = [typed(item, "input[]", Mapping) for item in given] if isinstance(given, list) else []
    messages = list(_messages(items, lose)) if isinstance(given, list) else [{"role": "user", "content": given}]
    check_keys(body, _REQUEST_KEYS, "request", lose)
    if optional(body, "store", bool):
        lose("`store`, which asks the provider to store the response")
    if set(list_of(body, "include", str) or ()) - {_INCLUDED}:
        lose(f"`include` of more than {_INCLUDED}")
    tools = tools_from_wire(body, lose)
    return LLMRequest(
        messages=messages,
        system_prompt=optional(body, "instructions", str),
        tools=tools or None,
        tool_choice=tool_choice_from_wire(body, lose) if tools else None,
        max_output_tokens=optional(body, "max_output_tokens", int),
        temperature=optional(body, "temperature", *NUMBER),
        top_p=optional(body, "top_p", *NUMBER),
        stream=bool(optional(body, "stream", bool)),
        metadata=optional(body, "metadata", Mapping),
        service_tier=optional(body, "service_tier", str),
    )


def request_to_body(
    request: LLMRequest, *, model: str, strict: bool = True, report: Report | None = None
) -> dict[str, Any]:
    """Converts `request` to a body for `model`. The body asks the endpoint to store nothing and to encrypt reasoning.

    Raises:
        UnsendableRequestError: `request` is malformed, or has unsupported content and `strict` is set.
    """
    lose = on_loss(strict, report, UnsendableRequestError)
    with errors_as(UnsendableRequestError):
        items = [item for message in request.messages for item in _items_of_message(message, lose)]
        body: dict[str, Any] = {"model": model, "input": items, "store": False, "include": [_INCLUDED]}
        if request.system_prompt is not None:
            body["instructions"] = request.system_prompt
        if request.tools:
            body["tools"] = [tool_to_wire(tool, lose) for tool in request.tools]
            if (choice := request.tool_choice) is not None:
                body["tool_choice"] = (
                    choice if isinstance(choice, str) else {"type": "function", "name": tool_name(choice)}
                )
        for name in ("max_output_tokens", "temperature", "top_p", "service_tier"):
            if (value := getattr(request, name)) is not None:
                body[name] = value
        for name in ("top_k", "stop_sequences"):
            if getattr(request, name) not in (None, ()):
                lose(f"`{name}`, which the Responses API does not have")
        if request.stream:
            body["stream"] = True
        texts = {key: value for key, value in (request.metadata or {}).items() if isinstance(value, str)}
        check_keys(request.metadata or {}, texts, "metadata", lose)
        return body | ({"metadata": texts} if texts else {})


def response_to_body(
    response: LLMResponse,
    *,
    model: str | None = None,
    response_id: str = "resp_0",
    created: int = 0,
    forms: Mapping[str, ToolForm] | None = None,
) -> dict[str, Any]:
    """Converts an `LLMResponse` to the body of a response.

    Args:
        response: Response to convert.
        model: Name of the model in the body. Default: the model that responded.
        response_id: Id of the response, from which the ids of its items are derived.
        created: Time of creation in epoch seconds.
        forms: Formats of tool calls, which `tool_forms` returns for the request's body.
    """
    pieces = [one for one in response.data if not isinstance(one, ThinkingData) or one.content or one.signature]
    tail = response_id.removeprefix("resp_")
    items = [_item_of_piece(piece, f"{tail}_{number}", forms or {}) for number, piece in enumerate(pieces)]
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(response.finish_reason or "")
    return empty_response(model or response.model or "", response_id, created) | {
        "status": "completed" if reason is None else "incomplete",
        "incomplete_details": None if reason is None else {"reason": reason},
        "output": items,
        "usage": usage_to_wire(response.usage),
    }


def empty_response(model: str, response_id: str, created: int) -> dict[str, Any]:
    """Returns the body of a response that has the status `in_progress` and no output yet."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def response_from_body(body: Any, *, strict: bool = True, report: Report | None = None) -> LLMResponse:
    """Converts the parsed body of a response to an `LLMResponse`.

    Raises:
        MalformedResponseError: `body` is not a response, reports a failure, or has a field that an `LLMResponse` cannot
            represent and `strict` is set.
    """
    lose = on_loss(strict, report)
    with errors_as(MalformedResponseError):
        typed(body, "the response", Mapping)
        status = optional(body, "status", str)
        if status in ("failed", "cancelled"):
            raise WireFormatError(
                f"Expected a complete response, got the status {status!r} with the error {shorten(body.get('error'))}"
            )
        data: list[Piece] = []
        refused = False
        for item in required(body, "output", list):
            kind = required(typed(item, "output[]", Mapping), "type", str)
            pieces = _pieces_of_item(item, kind, lose)
            if pieces is None:
                lose(f"`output[{kind}]`, an item that ares_exp does not support")
                continue
            data += pieces
            content = item.get("content")
            refused |= isinstance(content, list) and any(part.get("type") == "refusal" for part in content)
        return LLMResponse(
            data=data,
            usage=_usage(optional(body, "usage", Mapping) or {}),
            finish_reason="refusal" if refused else _finish_reason(body, status, data),
            model=optional(body, "model", str) or None,
        )


def usage_to_wire(usage: Usage) -> dict[str, Any]:
    """Converts token counts to the API's `usage`, including the details of input and output."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens},
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


# Requests, from the API's format


def _messages(items: Sequence[Mapping[str, Any]], lose: Report) -> Iterator[dict[str, Any]]:
    said: list[Piece] = []
    for item in items:
        kind = optional(item, "type", str) or "message"
        if (pieces := _pieces_of_item(item, kind, lose)) is not None:
            said += pieces
        elif (message := _message(item, kind, lose)) is not None:
            if said:
                yield assistant_message(said)
            said = []
            yield message
    if said:
        yield assistant_message(said)


def _pieces_of_item(item: Mapping[str, Any], kind: str, lose: Report) -> list[Piece] | None:
    """Converts an item to pieces of a response. Returns `None` if the item is not from the assistant."""
    if kind in _CALLS:
        return [call_from_item(item, lose)]
    if kind == "reasoning":
        return _reasoning(item, lose)
    if kind == "message" and required(item, "role", str) == "assistant":
        check_keys(item, _MESSAGE_KEYS, "message", lose)
        parts = _parts(required(item, "content", str, list), lose)
        if others := [part for part in parts if part["type"] != "text"]:
            raise WireFormatError(f"Expected text in a message of the assistant's `content`, got {shorten(others[0])}")
        return [TextData(part["text"]) for part in parts]
    return None


def _message(item: Mapping[str, Any], kind: str, lose: Report) -> dict[str, Any] | None:
    if kind == "message":
        check_keys(item, _MESSAGE_KEYS, "message", lose)
        role = required(item, "role", str)
        if role not in ("user", "system", "developer"):
            raise WireFormatError(f"Expected `role` to be user, assistant, system or developer, got {shorten(role)}")
        return {"role": role, "content": content_of(_parts(required(item, "content", str, list), lose))}
    if kind in _OUTPUTS:
        check_keys(item, _OUTPUT_KEYS, "output of a tool", lose)
        answered = optional(item, "call_id", str) or required(item, "id", str)
        content = content_of(_parts(required(item, "output", str, list), lose))
        return {"role": "tool", "tool_call_id": answered, "content": content}
    if kind == "agent_message":  # from another agent of Codex
        return {"role": "user", "content": content_of(_parts(required(item, "content", list), lose))}
    if kind == "item_reference":
        raise WireFormatError(
            "`item_reference` is not supported, because nothing is stored here. Send the item itself, with "
            "`store: false`."
        )
    if kind != "additional_tools":  # tools are read separately
        lose(f"`input[{kind}]`, an item that ares_exp does not support")
    return None


def _parts(content: str | list[Any], lose: Report) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text_part(content)]
    return [made for part in content if (made := _part(typed(part, "content[]", Mapping), lose)) is not None]


def _part(part: Mapping[str, Any], lose: Report) -> dict[str, Any] | None:
    kind = required(part, "type", str)
    if kind in ("input_text", "output_text", "text", "summary_text"):
        return text_part(required(part, "text", str))
    if kind in ("refusal", "encrypted_content"):  # Codex encrypts messages only between models of OpenAI
        return text_part(required(part, kind, str))
    if kind == "input_image":
        check_keys(part, {"type", "image_url", "detail"}, "image", lose)
        detail = optional(part, "detail", str) or "auto"
        return image_part(required(part, "image_url", str), **({} if detail == "auto" else {"detail": detail}))
    if kind == "input_file":
        check_keys(part, {"type", "file_data", "filename"}, "file", lose)
        file = {"filename": optional(part, "filename", str) or "file", "file_data": required(part, "file_data", str)}
        return {"type": "file", "file": file}
    lose(f"`content[{kind}]`, a part that ares_exp does not support")
    return None


def _reasoning(item: Mapping[str, Any], lose: Report) -> list[Piece]:
    check_keys(item, _REASONING_KEYS, "reasoning", lose)
    summary, content = _reasoning_texts(item, "summary"), _reasoning_texts(item, "content")
    if summary and content:
        lose("`summary` of reasoning whose text is also present")
    text = "\n\n".join(content or summary)
    opaque = optional(item, "encrypted_content", str) or None
    if opaque is None:
        return [ThinkingData(text)] if text else []
    if sealed := unsealed(opaque):
        return [replace(piece, content=piece.content or text) for piece in sealed]
    return [ThinkingData(text, opaque) if text else ThinkingData(opaque, redacted=True)]


def _reasoning_texts(item: Mapping[str, Any], name: str) -> list[str]:
    return [required(part, "text", str) for part in list_of(item, name, Mapping) or ()]


# Requests, to the API's format


def _items_of_message(message: Mapping[str, Any], lose: Report) -> list[dict[str, Any]]:
    role = required(message, "role", str)
    content = message.get("content")
    if role == "tool":
        output = content if isinstance(content, str) else _wire_parts(content, "input_text", lose)
        return [{"type": "function_call_output", "call_id": required(message, "tool_call_id", str), "output": output}]
    if role != "assistant":
        return [{"type": "message", "role": role, "content": _wire_parts(content, "input_text", lose)}]
    items = [_reasoning_item(piece) for piece in reasoning_of_message(message, lose)]
    parts = content if isinstance(content, list | tuple) else ()
    said = _wire_parts([part for part in parts if part.get("type") != "thinking"] or content, "output_text", lose)
    if said:
        items.append({"type": "message", "role": "assistant", "content": said})
    return items + [call_item(call, None, None) for call in calls_of(message)]


def _wire_parts(content: Any, text_type: str, lose: Report) -> list[dict[str, Any]]:
    if not isinstance(content, list | tuple):
        return [{"type": text_type, "text": content}] if content else []
    parts = []
    for part in content:
        kind = required(part, "type", str)
        if kind in ("text", "refusal"):
            parts.append({"type": text_type, "text": required(part, kind, str)})
        elif kind == "image_url":
            image = required(part, "image_url", Mapping)
            detail = image.get("detail") or "auto"
            parts.append({"type": "input_image", "image_url": required(image, "url", str), "detail": detail})
        elif kind == "file":
            file = required(part, "file", Mapping)
            name = optional(file, "filename", str) or "file"
            parts.append({"type": "input_file", "filename": name, "file_data": required(file, "file_data", str)})
        else:
            lose(f"`content[{kind}]`, which the Responses API does not have")
    return parts


def _reasoning_item(piece: ThinkingData) -> dict[str, Any]:
    """Converts a piece of reasoning to an item of a request.

    Encrypted or signed reasoning is sent back unchanged. Endpoints that do not encrypt reasoning get the text.
    """
    if piece.redacted:
        return {"type": "reasoning", "summary": [], "encrypted_content": piece.content}
    if piece.signature:
        return {"type": "reasoning", "summary": _summary(piece), "encrypted_content": piece.signature}
    text = {"type": "reasoning_text", "text": piece.content}
    return {"type": "reasoning", "id": "rs_0", "summary": [], "content": [text]}


# Pieces of responses, both ways


def _item_of_piece(piece: Piece, tail: str, forms: Mapping[str, ToolForm]) -> dict[str, Any]:
    if isinstance(piece, ToolCallData):
        form = forms.get(piece.name)
        prefix = {"custom": "ctc_", "local_shell": "lsh_"}.get(form.kind if form else "", "fc_")
        return call_item(piece, prefix + tail, form)
    if isinstance(piece, ThinkingData):
        summary = [] if piece.redacted else _summary(piece)
        # A piece's own opaque text is sent if a reader can restore the whole piece from it. Otherwise, a seal is sent.
        own = (piece.content if not piece.signature else None) if piece.redacted else piece.content and piece.signature
        opaque = own or seal(piece if piece.redacted else replace(piece, content=""))
        return {"id": f"rs_{tail}", "type": "reasoning", "summary": summary, "encrypted_content": opaque}
    text = {"type": "output_text", "text": piece.content, "annotations": [], "logprobs": []}
    return {"id": f"msg_{tail}", "type": "message", "status": "completed", "role": "assistant", "content": [text]}


def _summary(piece: ThinkingData) -> list[dict[str, Any]]:
    return [{"type": "summary_text", "text": piece.content}] if piece.content else []


def _finish_reason(body: Mapping[str, Any], status: str | None, data: Sequence[Piece]) -> str | None:
    if status == "incomplete":
        reason = optional(optional(body, "incomplete_details", Mapping) or {}, "reason", str)
        return "length" if reason in (None, "max_output_tokens") else reason
    if status is None:
        return None
    return "tool_calls" if any(isinstance(piece, ToolCallData) for piece in data) else "stop"


def _usage(usage: Mapping[str, Any]) -> Usage:
    given = optional(usage, "input_tokens_details", Mapping) or {}
    made = optional(usage, "output_tokens_details", Mapping) or {}
    return Usage(
        prompt_tokens=count_of(usage, "input_tokens"),
        generated_tokens=count_of(usage, "output_tokens"),
        cached_tokens=count_of(given, "cached_tokens"),
        cache_write_tokens=count_of(given, "cache_write_tokens"),
        reasoning_tokens=count_of(made, "reasoning_tokens"),
    )


_LAST = ("response.completed", "response.incomplete", "response.failed")


class StreamedResponse(ResponseStream):
    """Assembles a streamed response of the Responses API from its events."""

    def __init__(self) -> None:
        super().__init__()
        self._items: dict[int, Mapping[str, Any]] = {}
        self._response: Mapping[str, Any] = {}

    @property
    def may_end(self) -> bool:
        """Whether an event with the complete response, or with an error, has been received."""
        return self.is_complete and bool(self._response or self._error)

    def read(self, event: Mapping[str, Any]) -> None:
        """Adds one event to the response."""
        kind = required(event, "type", str)
        if kind == "error":
            nested = event.get("error")
            self.fail(nested if nested else {key: event.get(key) for key in ("code", "message", "param")})
        elif kind == "response.output_item.done":
            place = optional(event, "output_index", int)
            self._items[len(self._items) if place is None else place] = required(event, "item", Mapping)
        elif kind in _LAST:
            self._response = required(event, "response", Mapping)
            self.is_complete = True

    def assembled(self) -> dict[str, Any]:
        """Returns the response body that results from the events so far."""
        items = [item for _, item in sorted(self._items.items())]
        return {**self._response, "output": self._response.get("output") or items}


# Tools and their calls


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The format of one tool's calls in the Responses API.

    Attributes:
        kind: Kind of tool. Calls contain JSON arguments (`"function"`), free text (`"custom"`), or an action with a
            command (`"local_shell"`). The policy sees every tool as a function.
        name: Name of the tool in the API.
        namespace: Group of the tool in the API, or `None`.
    """

    kind: Literal["function", "custom", "local_shell"]
    name: str
    namespace: str | None = None


CUSTOM_ARGUMENT = "input"
LOCAL_SHELL = "local_shell"
_LOCAL_SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
        "user": {"type": "string"},
    },
    "required": ["command"],
}
_FUNCTION_KEYS = {"type", "name", "description", "parameters", "strict"}
_CUSTOM_KEYS = {"type", "name", "description", "format"}
_CALL_KEYS = {"type", "id", "call_id", "name", "namespace", "status"}


def tools_from_wire(body: Mapping[str, Any], lose: Report) -> list[dict[str, Any]]:
    """Converts the tools of a request, including tools that are items of its `input`.

    The provider's own tools are not supported. For each of them, the callback `lose` gets a description.

    Raises:
        WireFormatError: A tool is malformed.
    """
    return [made for tool, namespace in _wired_tools(body) if (made := _tool(tool, namespace, lose)) is not None]


def tool_forms(body: Mapping[str, Any]) -> dict[str, ToolForm]:
    """Returns the call formats of a request's tools, by the tool's name in the chat-completions format.

    Tools without an entry have plain function calls.

    Raises:
        WireFormatError: A tool is malformed.
    """
    forms = {}
    for tool, namespace in _wired_tools(body):
        kind, name = tool["type"], optional(tool, "name", str)
        space = None if namespace is None else required(namespace, "name", str)
        if kind == LOCAL_SHELL:
            forms[LOCAL_SHELL] = ToolForm("local_shell", LOCAL_SHELL)
        elif name is not None and (kind == "custom" or (kind == "function" and space is not None)):
            forms[joined(space, name)] = ToolForm("custom" if kind == "custom" else "function", name, space)
    return forms


def joined(namespace: str | None, name: str) -> str:
    """Returns the name of a tool in the chat-completions format: `NAMESPACE__NAME`, or `NAME` without a namespace."""
    return name if not namespace else f"{namespace.removesuffix('__')}__{name}"


def tool_to_wire(tool: Mapping[str, Any], lose: Report) -> dict[str, Any]:
    """Converts a tool from the chat-completions format to a function of the Responses API.

    Raises:
        WireFormatError: The tool is not a function.
    """
    name, function = tool_name(tool), tool["function"]
    check_keys(function, {"name", "description", "parameters", "strict"}, "tool", lose)
    made = {"type": "function", "name": name, "description": function.get("description")}
    made |= {"parameters": plain(function.get("parameters")) or {"type": "object", "properties": {}}}
    return {key: value for key, value in made.items() if value is not None} | {"strict": bool(function.get("strict"))}


def tool_choice_from_wire(body: Mapping[str, Any], lose: Report) -> str | dict[str, Any] | None:
    """Converts the tool choice of a request. Calls `lose` if it selects an unsupported kind of tool.

    Raises:
        WireFormatError: The tool choice is malformed.
    """
    choice: str | Mapping[str, Any] | None = optional(body, "tool_choice", str, Mapping)
    if not isinstance(choice, Mapping):
        if choice not in (None, "auto", "none", "required"):
            raise WireFormatError(f"Expected `tool_choice` to be auto, none or required, got {shorten(choice)}")
        return choice
    kind = required(choice, "type", str)
    if kind in ("function", "custom"):
        name = joined(optional(choice, "namespace", str), required(choice, "name", str))
        return {"type": "function", "function": {"name": name}}
    lose(f"`tool_choice.{kind}`, which ares_exp does not support")
    return None


def call_from_item(item: Mapping[str, Any], lose: Report) -> ToolCallData:
    """Converts an item of the Responses API that contains a tool call.

    Raises:
        WireFormatError: The item is malformed.
    """
    kind, call_id = item["type"], required(item, "call_id", str)
    if kind == "local_shell_call":
        action = required(item, "action", Mapping)
        given = {key: value for key, value in plain(action).items() if key != "type" and value is not None}
        return ToolCallData(call_id, LOCAL_SHELL, json.dumps(given, ensure_ascii=False))
    name = joined(optional(item, "namespace", str), required(item, "name", str))
    if kind == "custom_tool_call":
        check_keys(item, _CALL_KEYS | {"input"}, "call", lose)
        return ToolCallData(
            call_id, name, json.dumps({CUSTOM_ARGUMENT: required(item, "input", str)}, ensure_ascii=False)
        )
    check_keys(item, _CALL_KEYS | {"arguments"}, "call", lose)
    return ToolCallData(call_id, name, required(item, "arguments", str))


def call_item(call: ToolCallData, item_id: str | None, form: ToolForm | None) -> dict[str, Any]:
    """Converts a tool call to an item in the format `form` (default: a function call), with the id `item_id` if set."""
    form = form or ToolForm("function", call.name)
    named = {"name": form.name} | ({} if form.namespace is None else {"namespace": form.namespace})
    head = {} if item_id is None else {"id": item_id}
    if form.kind == "custom":
        text = (arguments_object(call.arguments) or {}).get(CUSTOM_ARGUMENT)
        text = text if isinstance(text, str) else call.arguments  # the agent reports invalid input
        return {**head, "type": "custom_tool_call", "call_id": call.id, **named, "input": text, "status": "completed"}
    if form.kind == "local_shell":
        action = _action(call.arguments)
        return {**head, "type": "local_shell_call", "call_id": call.id, "action": action, "status": "completed"}
    called = {"type": "function_call", "call_id": call.id, **named, "arguments": call.arguments}
    return {**head, **called, "status": "completed"}


def _wired_tools(body: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    lists = [list_of(body, "tools", Mapping) or []]
    items = body.get("input")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping) and item.get("type") == "additional_tools":
            lists.append(list_of(item, "tools", Mapping) or [])
    for tool in (one for some in lists for one in some):
        if required(tool, "type", str) != "namespace":
            yield tool, None
            continue
        for inner in list_of(tool, "tools", Mapping) or ():
            required(inner, "type", str)
            yield inner, tool


def _tool(tool: Mapping[str, Any], namespace: Mapping[str, Any] | None, lose: Report) -> dict[str, Any] | None:
    kind = tool["type"]
    if kind == LOCAL_SHELL:
        return function_tool(LOCAL_SHELL, "Runs a command and returns its output.", _LOCAL_SHELL_PARAMETERS)
    if kind not in ("function", "custom"):
        lose(f"`tools[{kind}]`, a built-in tool of the provider")
        return None
    space, about = (None, None) if namespace is None else (required(namespace, "name", str), namespace)
    name = joined(space, required(tool, "name", str))
    said = optional(tool, "description", str)
    if about is not None and (group := optional(about, "description", str)):
        said = f"{group}\n\n{said}" if said else group
    if kind == "custom":
        check_keys(tool, _CUSTOM_KEYS, "tool", lose)
        form = optional(tool, "format", Mapping) or {}
        text: dict[str, Any] = {"type": "string"}
        if form.get("type") == "grammar":
            syntax, definition = optional(form, "syntax", str) or "", required(form, "definition", str)
            text["description"] = f"Text of this {syntax} grammar:\n{definition}"
        return function_tool(
            name, said, {"type": "object", "properties": {CUSTOM_ARGUMENT: text}, "required": [CUSTOM_ARGUMENT]}
        )
    check_keys(tool, _FUNCTION_KEYS, "tool", lose)
    parameters = optional(tool, "parameters", Mapping)
    return function_tool(name, said, parameters, strict=optional(tool, "strict", bool) or None)


def _action(arguments: str) -> dict[str, Any]:
    """Returns the action of a `local_shell` call. Malformed arguments become the command, which then fails."""
    given = arguments_object(arguments) or {}
    command = given.get("command")
    is_list = isinstance(command, list) and all(isinstance(word, str) for word in command)
    words = command if is_list else ["bash", "-lc", command] if isinstance(command, str) else [arguments]
    more = {key: value for key, value in given.items() if key in ("working_directory", "timeout_ms", "user")}
    return {"type": "exec", "command": words, "env": given.get("env") or {}, **more}
