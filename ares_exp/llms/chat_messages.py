"""Messages in the chat-completions format: validation of external messages, and helpers for converters.

| role | fields |
|---|---|
| `system`, `developer`, `user` | `content`: a text, or parts (`text`, `image_url`, `file`, …) |
| `assistant` | `content`, `tool_calls` (`id`, `function.name`, `function.arguments`), reasoning (see below) |
| `tool` | `tool_call_id`, `content` |

Reasoning has various fields:

| in a message of the assistant | for example |
|---|---|
| `reasoning_content`, a text | DeepSeek, SGLang, vLLM |
| `reasoning`, a text | OpenRouter, newer vLLM |
| `reasoning_details`, objects of several types (see `_DETAILS`), some with a `signature` | OpenRouter |
| parts of the `content` with the type `thinking` | Mistral |

Engines separate `<think>…</think>` from the text if they are started with the model's reasoning parser. Otherwise the
reasoning stays in the text.

Agents keep the text of a response, but not its reasoning. Some endpoints require the reasoning in later requests.
`KnownReasoning` finds the response that a message repeats, and adds its reasoning to the message.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode, urlsafe_b64decode
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ares_exp.llms.request import REASONING_FIELDS, LLMRequest
from ares_exp.llms.response import (
    LLMResponse,
    Piece,
    TextData,
    ThinkingData,
    ToolCallData,
    piece_from_dict,
    piece_to_dict,
)
from ares_exp.llms.wire import Report, WireFormatError, optional, parse_body, required, shorten, typed

# Reasoning


ReasoningField = Literal["reasoning_content", "reasoning", "reasoning_details"]


def reasoning_of_message(message: Mapping[str, Any], lose: Report) -> list[ThinkingData]:
    """Returns the reasoning of an assistant message.

    If `reasoning_details` contain readable reasoning, the text fields are ignored, because they have the same content.
    From each detail, only the content and the signature are kept.

    Args:
        message: Assistant message.
        lose: Callback that receives a description of reasoning in an unknown format. Unless the callback raises an
            error, this reasoning is dropped.
    """
    details = message.get("reasoning_details")
    if not isinstance(details, list | tuple | None):  # a tuple in a parsed request
        lose("`reasoning_details` that are not a list")
        details = None
    pieces = [piece for detail in details or () if (piece := _from_detail(detail, lose)) is not None]
    if all(piece.redacted for piece in pieces):
        pieces = [*_from_texts(message, lose), *pieces]
    return [piece for piece in pieces if piece.content or piece.signature]


def reasoning_of_part(part: Mapping[str, Any], lose: Report) -> ThinkingData:
    """Converts a content part of type `thinking`: a string, or a list of text parts. Calls `lose` for other parts."""
    inner = part.get("thinking")
    inner = [{"text": inner}] if isinstance(inner, str) else inner
    parts = inner if isinstance(inner, list | tuple) else [None]
    texts = [one.get("text") if isinstance(one, Mapping) else None for one in parts]
    if not all(isinstance(text, str) for text in texts):
        lose("parts of reasoning that are not text")
    return ThinkingData("".join(text for text in texts if isinstance(text, str)))


def reasoning_to_message(pieces: Sequence[ThinkingData], field: ReasoningField | None = None) -> dict[str, Any]:
    """Returns the fields of an assistant message that contain the reasoning. The result is empty without reasoning.

    Args:
        pieces: Pieces of reasoning.
        field: Name of the field. `reasoning_content` and `reasoning` contain only readable text. Default:
            `reasoning_content`, or `reasoning_details` if a text cannot contain all information.
    """
    if field is None:
        is_plain = len(pieces) == 1 and pieces[0] == ThinkingData(pieces[0].content) and pieces[0].content
        field = "reasoning_content" if is_plain else "reasoning_details"
    if field == "reasoning_details":
        return {field: [_to_detail(piece) for piece in pieces]} if pieces else {}
    text = reasoning_text(pieces)
    return {field: text} if text else {}


def reasoning_text(pieces: Iterable[ThinkingData]) -> str:
    """Returns the readable reasoning as one text."""
    return "".join(piece.content for piece in pieces if not piece.redacted)


def _from_texts(message: Mapping[str, Any], lose: Report) -> list[ThinkingData]:
    """Returns the reasoning in the text fields. If both fields contain the same text, the result contains it once."""
    texts: dict[str, None] = {}
    for name in REASONING_FIELDS[:2]:
        if isinstance(text := message.get(name), str):
            texts[text] = None
        elif text is not None:
            lose(f"`{name}` that is not text")
    return [ThinkingData(text) for text in texts]


_DETAILS = {"reasoning.text": "text", "reasoning.summary": "summary", "reasoning.encrypted": "data"}
"""For each type of entry in `reasoning_details`, the field that contains the reasoning."""


def _from_detail(detail: Any, lose: Report) -> ThinkingData | None:
    kind = detail.get("type") if isinstance(detail, Mapping) else None
    field = _DETAILS.get(kind) if isinstance(kind, str) else None
    content, signature = (detail.get(field) or "", detail.get("signature")) if field is not None else (None, None)
    if not isinstance(content, str) or not isinstance(signature, str | None):
        lose(f"`reasoning_details` of type {shorten(kind)}")
        return None
    return ThinkingData(content, signature, redacted=kind == "reasoning.encrypted")


def _to_detail(piece: ThinkingData) -> dict[str, Any]:
    signature = {} if piece.signature is None else {"signature": piece.signature}
    if piece.redacted:
        return {"type": "reasoning.encrypted", "data": piece.content, **signature}
    return {"type": "reasoning.text", "text": piece.content, **signature}


class KnownReasoning:
    """Stores the reasoning of earlier responses, and adds it to messages that repeat these responses.

    A message repeats a response if it has the same text and tool calls. If several responses are equal, the
    last of them is matched with the last such message, and so on in reverse order.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[ThinkingData, ...]]] = defaultdict(list)

    def add(self, response: LLMResponse) -> None:
        """Stores the reasoning of a response, even if it is empty, so that equal responses are matched in order."""
        calls = [(call.id, call.name, call.arguments) for call in response.data if isinstance(call, ToolCallData)]
        self._known[_key(response.text, calls)].append(response.thinking)

    def add_message(self, message: Mapping[str, Any], pieces: Sequence[ThinkingData]) -> None:
        """Stores `pieces` as the reasoning of a response whose text and tool calls are in `message`."""
        self._known[_key(*_said(message))].append(tuple(pieces))

    def put_into(
        self,
        messages: Sequence[Mapping[str, Any]],
        write: Callable[[Mapping[str, Any], Sequence[ThinkingData]], Mapping[str, Any]],
    ) -> list[Mapping[str, Any]]:
        """Returns the messages, with reasoning added to each message that repeats a response.

        `write` gets a message and its reasoning, and returns the new message. Skips messages that have reasoning.
        """
        seen: dict[str, int] = defaultdict(int)
        made: list[Mapping[str, Any]] = []
        for message in reversed(messages):
            made.append(message)
            if message.get("role") != "assistant" or any(message.get(name) for name in REASONING_FIELDS):
                continue
            key = _key(*_said(message))
            known = self._known.get(key, ())
            seen[key] += 1
            if seen[key] <= len(known) and known[-seen[key]]:
                made[-1] = write(message, known[-seen[key]])
        return made[::-1]


def _said(message: Mapping[str, Any]) -> tuple[str, list[tuple[Any, Any, Any]]]:
    """Returns the text and the tool calls of an assistant message, to find the response with the same content."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list | tuple):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "".join(text for text in parts if isinstance(text, str))
    said = []
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            said.append((call.get("id"), function.get("name"), function.get("arguments")))
    return content if isinstance(content, str) else "", said


def _key(text: str, calls: Sequence[tuple[Any, Any, Any]]) -> str:
    return json.dumps([text, calls], default=str)


_SEAL = "ares-exp"


def seal(*pieces: ThinkingData) -> str:
    """Encodes reasoning as a *seal*: opaque base64 text that agents send back."""
    return b64encode(json.dumps([_SEAL, *map(piece_to_dict, pieces)]).encode()).decode()


def unsealed(opaque: str) -> list[ThinkingData] | None:
    """Decodes the reasoning in a seal. Returns `None` if `opaque` is not a seal."""
    try:
        mark, *data = parse_body(urlsafe_b64decode(opaque.replace("+", "-").replace("/", "_")))
        pieces = [piece_from_dict(one) for one in data]
    except (ValueError, TypeError, WireFormatError):
        return None
    are_valid = all(
        isinstance(one, ThinkingData) and isinstance(one.content, str) and isinstance(one.signature, str | None)
        for one in pieces
    )
    return [one for one in pieces if isinstance(one, ThinkingData)] if mark == _SEAL and are_valid else None


# Messages


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
