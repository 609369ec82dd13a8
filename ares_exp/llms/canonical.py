"""The canonical form of a request, which is independent of the client's formatting.

Clients repeat a request after a lost connection, and they repeat the conversation in each request. The copies are not
always identical. The canonical form removes insignificant differences:

| part | canonical form |
|---|---|
| content | adjacent text parts are joined, a list with one text part becomes a string, missing content becomes `""` |
| arguments of tool calls | parsed JSON: whitespace and the order of keys are ignored, `1` and `1.0` are equal |
| ids of tool calls | the number of the call in the conversation |
| null or empty fields of messages, `cache_control` | removed |
| reasoning | removed, because clients may omit it |
| the system prompt | a first message of role system |
| tools | sorted by name |
| `metadata`, `stream`, sampling, `origin` | removed |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ares_exp.llms.request import REASONING_FIELDS, LLMRequest

Normalise = Callable[[Any], Any]
"""Function that changes a canonical message before messages are compared, for example to remove times."""

_LEFT_OUT = frozenset({*REASONING_FIELDS, "cache_control", "tool_calls", "tool_call_id", "content"})
_NOTHING: tuple[Any, ...] = (None, "", [], {}, ())


@dataclass(frozen=True, slots=True)
class Canonical:
    """Digests of the canonical form of a request.

    Attributes:
        messages: Digest of each message, starting with the system prompt.
        settings: Digest of the tools, the tool choice and the stop sequences.
    """

    messages: tuple[bytes, ...]
    settings: bytes

    @property
    def fingerprint(self) -> str:
        """Digest of the complete request. Requests with the same canonical form have the same fingerprint."""
        return _digest([self.settings.hex(), *(one.hex() for one in self.messages)]).hex()

    def continues(self, earlier: Canonical) -> bool:
        """Returns whether the messages of this request start with all messages of the `earlier` request."""
        return self.messages[: len(earlier.messages)] == earlier.messages


def canonical(request: LLMRequest, normalise: Normalise | None = None) -> Canonical:
    """Returns the digests of a request's canonical form. If set, `normalise` changes each message before hashing."""
    messages = canonical_messages(request)
    settings = {
        "tools": sorted((_value(tool) for tool in request.tools or ()), key=_tool_name),
        "tool_choice": _value(request.tool_choice),
        "stop": _value(request.stop_sequences),
    }
    return Canonical(
        tuple(_digest(message if normalise is None else normalise(message)) for message in messages),
        _digest({name: value for name, value in settings.items() if value not in _NOTHING}),
    )


def canonical_messages(request: LLMRequest) -> list[dict[str, Any]]:
    """Returns the messages in canonical form, starting with the system prompt."""
    system = [] if not request.system_prompt else [{"role": "system", "content": request.system_prompt}]
    return list(_canonical([*system, *request.messages]))


def _canonical(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    numbers: dict[str, int] = {}
    count = 0
    for message in messages:
        made = {key: _value(value) for key, value in message.items() if key not in _LEFT_OUT and value not in _NOTHING}
        if (content := _content(message.get("content"))) not in _NOTHING:
            made["content"] = content
        calls = []
        for call in message.get("tool_calls") or ():
            numbers[_text(call.get("id") if isinstance(call, Mapping) else None)] = count
            calls.append({"number": count} | _call(call))
            count += 1
        if calls:
            made["tool_calls"] = calls
        if message.get("tool_call_id") is not None:
            made["answers"] = numbers.get(_text(message["tool_call_id"]))
        yield made


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return {"call": _value(call)}
    return {"name": function.get("name"), "arguments": _arguments(function.get("arguments"))}


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return _value(arguments)
    try:
        return {"json": _value(json.loads(arguments or "{}"))}
    except (ValueError, RecursionError):
        return arguments


def _content(content: Any) -> Any:
    """Joins adjacent text parts. Content with a single text part becomes a string."""
    if not isinstance(content, list | tuple):
        return _value(content)
    parts: list[Any] = []
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        made = part["text"] if is_text else _value(part)
        if isinstance(made, str) and parts and isinstance(parts[-1], str):
            parts[-1] += made
        elif made not in _NOTHING:
            parts.append(made)
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def _value(value: Any) -> Any:
    """Copies JSON-like data without `cache_control`. Converts integral floats to integers."""
    if isinstance(value, Mapping):
        return {key: _value(item) for key, item in value.items() if key != "cache_control"}
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return str(function.get("name")) if isinstance(function, Mapping) else ""


def _digest(value: Any) -> bytes:
    return blake2b(json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), digest_size=16).digest()
