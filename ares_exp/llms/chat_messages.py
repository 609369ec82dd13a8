"""Messages in the chat-completions format: validation of external messages, and helpers for converters.

| role | fields |
|---|---|
| `system`, `developer`, `user` | `content`: a text, or parts (`text`, `image_url`, `file`, …) |
| `assistant` | `content`, `tool_calls` (`id`, `function.name`, `function.arguments`), reasoning (see `reasoning`) |
| `tool` | `tool_call_id`, `content` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ares_exp.errors import WireFormatError
from ares_exp.llms.reasoning import reasoning_to_message
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import Piece, TextData, ThinkingData, ToolCallData
from ares_exp.llms.wire import optional, required, shorten, typed

_ROLES = ("system", "developer", "user", "assistant", "function")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w-]+=[^;,]*)*);base64,(.*)", re.DOTALL)


def parts_of(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the parts of a message's content. Yields nothing if the content is a plain text."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        yield from (part for part in content if isinstance(part, Mapping))


def check_message(value: Any) -> Mapping[str, Any]:
    """Checks the fields of an agent's message on which other code relies. Returns the message.

    Raises:
        WireFormatError: A field is missing or has an invalid type.
    """
    message: Mapping[str, Any] = typed(value, "messages[]", Mapping)
    role = required(message, "role", str)
    content = optional(message, "content", str, list)
    for part in content if isinstance(content, list) else ():
        kind = required(typed(part, "content[]", Mapping), "type", str)
        if kind == "text":
            required(part, "text", str)
    optional(message, "tool_call_id", str)
    if role == "tool":
        required(message, "tool_call_id", str)
    elif role not in _ROLES:
        raise WireFormatError(f"Expected `role` to be one of {', '.join(_ROLES)} or tool, got {shorten(role)}")
    calls_of(message)
    return message


def calls_of(message: Mapping[str, Any]) -> list[ToolCallData]:
    """Returns the tool calls of a message.

    Raises:
        WireFormatError: A field of a call is missing or has an invalid type.
    """
    calls = []
    for call in optional(message, "tool_calls", list, tuple) or ():
        function = required(typed(call, "tool_calls[]", Mapping), "function", Mapping)
        call_id, name = required(call, "id", str), required(function, "name", str)
        calls.append(ToolCallData(call_id, name, required(function, "arguments", str)))
    return calls


def split_system(request: LLMRequest) -> tuple[str | None, list[Mapping[str, Any]]]:
    """Returns the system prompt and the messages. System and developer messages at the start become part of the prompt.

    Some agents, such as Codex, send several such messages, which many chat templates do not support.
    """
    texts = [request.system_prompt or ""]
    messages = list(request.messages)
    while messages and messages[0].get("role") in ("system", "developer") and set(messages[0]) == {"role", "content"}:
        parts = list(parts_of(messages[0])) or [text_part(text_of(messages[0]["content"]))]
        if any(part.get("type") != "text" for part in parts):
            break
        texts += [required(part, "text", str) for part in parts]
        del messages[0]
    return "\n\n".join(filter(None, texts)) or None, messages


def text_of(content: Any) -> str:
    """Returns the text of a message's content: the text itself, or its joined text parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") in (None, "text"))
    return "".join(text for text in texts if isinstance(text, str))


def content_of(parts: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """Converts parts to the content of a message. A single text part becomes a string, as in most messages."""
    if not parts:
        return ""
    if len(parts) == 1 and set(parts[0]) == {"type", "text"}:
        text: str = parts[0]["text"]
        return text
    return list(parts)


def text_part(text: str) -> dict[str, Any]:
    """Returns a text as a part of a message's content."""
    return {"type": "text", "text": text}


def image_part(url: str, **more: Any) -> dict[str, Any]:
    """Returns an image as a part of a message's content. `more` contains further fields, such as `detail`."""
    return {"type": "image_url", "image_url": {"url": url, **more}}


def call_part(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Returns a tool call as an entry of a message's `tool_calls`."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Converts the pieces of a response to a message. Its `content` is `None` if there are tool calls but no text."""
    texts = [piece.content for piece in pieces if isinstance(piece, TextData)]
    calls = [call_part(piece.id, piece.name, piece.arguments) for piece in pieces if isinstance(piece, ToolCallData)]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    message |= reasoning_to_message([piece for piece in pieces if isinstance(piece, ThinkingData)])
    return message | ({"tool_calls": calls} if calls else {})


def data_url(media_type: str, data: str) -> str:
    """Returns a data URL for base64 data."""
    return f"data:{media_type};base64,{data}"


def split_data_url(url: str) -> tuple[str, str] | None:
    """Returns the media type and the base64 data of a data URL, or `None` for other URLs."""
    found = _DATA_URL.fullmatch(url)
    return (found[1] or "application/octet-stream", found[3]) if found else None


def function_tool(name: str, description: str | None, parameters: Any, **more: Any) -> dict[str, Any]:
    """Returns the definition of a tool in the chat-completions format. Omits fields with the value `None`."""
    function = {"name": name, "description": description, "parameters": parameters, **more}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def tool_name(tool: Mapping[str, Any]) -> str:
    """Returns the name of a tool in the chat-completions format.

    Raises:
        WireFormatError: The tool is not a function.
    """
    if tool.get("type", "function") != "function":
        raise WireFormatError(f"Expected all `tools` to have the type function, got {shorten(tool)}")
    name: str = required(required(tool, "function", Mapping), "name", str)
    return name


def arguments_object(arguments: str) -> dict[str, Any] | None:
    """Returns the parsed arguments of a tool call; `None` if they are not a JSON object, `{}` if the text is empty."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False)  # Python accepts numbers that JSON does not
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_INVALID_ARGUMENTS = "invalid_arguments"
"""Key for the text of invalid arguments, in the object that replaces them."""


def input_of_arguments(arguments: str) -> dict[str, Any]:
    """Parses a call's arguments for APIs that accept only objects. Other text becomes `{"invalid_arguments": TEXT}`."""
    given = arguments_object(arguments)
    return {_INVALID_ARGUMENTS: arguments} if given is None else given


def arguments_of_input(given: Mapping[str, Any]) -> str:
    """Converts an object from `input_of_arguments` back to the text of the arguments."""
    text = given.get(_INVALID_ARGUMENTS) if set(given) == {_INVALID_ARGUMENTS} else None
    return text if isinstance(text, str) else json.dumps(given, ensure_ascii=False)
