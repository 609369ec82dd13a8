"""Chat messages and actions as parts of ATIF steps, both ways.

Each pair of functions here goes to ATIF and back. What ATIF has no field for goes to `extra.ares_exp` of the step, the
tool call or the result, and only that: a message whose ordinary reading is exact leaves nothing there, another one the
fields in which it differs (`message`, and `without` for those it lacks).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ares_exp.llms.request import freeze

OURS = "ares_exp"
BASH = "bash"

_IMAGE_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}


def own(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """What this package put into the `extra` of a document, step, tool call or result."""
    found = (item.get("extra") or {}).get(OURS)
    return found if isinstance(found, Mapping) else {}


def with_own(item: dict[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """`item` with `ours` in its `extra`."""
    return item | {"extra": {OURS: dict(ours)}} if ours else item


def step_of_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The step (without its number) that shows a message: of the user, the system, or an assistant's copied one."""
    role = message.get("role")
    step: dict[str, Any] = {
        "source": {"system": "system", "assistant": "agent"}.get(str(role), "user"),
        "message": content_to_atif(message.get("content")),
    }
    if role == "assistant":
        step |= {"llm_call_count": 0, "is_copied_context": True}
        if calls := chat_calls(message.get("tool_calls")):
            step["tool_calls"] = [call_to_atif(*call) for call in calls]
    return with_own(step, _difference(message_of_step(step), message))


def message_of_step(step: Mapping[str, Any]) -> dict[str, Any]:
    """The message that a step shows."""
    role = {"agent": "assistant"}.get(step["source"], step["source"])
    calls = llm_calls(step)
    message = {"role": role, "content": content_from_atif(step["message"])}
    return _adapted(_with_calls(message, calls), own(step))


def result_of_message(message: Mapping[str, Any], call_id: str | None) -> dict[str, Any]:
    """The result that shows a message: what the tool call `call_id` gave, or what the LLM was shown for a command."""
    result: dict[str, Any] = {} if call_id is None else {"source_call_id": call_id}
    result["content"] = content_to_atif(message.get("content"))
    ids = {call_id} if message.get("role") == "tool" else set()
    return with_own(result, _difference(message_of_result(result, ids), message))


def message_of_result(result: Mapping[str, Any], llm_call_ids: Iterable[str | None]) -> dict[str, Any]:
    """The message that a result shows: a tool's, if the LLM called it, else the user's."""
    content = content_from_atif(result.get("content"))
    call_id = result.get("source_call_id")
    if call_id is not None and call_id in llm_call_ids:
        return _adapted({"role": "tool", "tool_call_id": call_id, "content": content}, own(result))
    return _adapted({"role": "user", "content": content}, own(result))


def reply_message(text: Any, calls: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """A reply as agents keep it in the conversation."""
    return _with_calls({"role": "assistant", "content": text}, calls)


def reply_difference(reply: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """What `extra.ares_exp` has to say of the message that an agent kept in place of `reply`."""
    return _difference(reply, message)


def kept_reply(step: Mapping[str, Any], action: Mapping[str, Any]) -> dict[str, Any]:
    """The message that an agent kept of the reply in `step`."""
    text = "".join(piece["content"] for piece in action["data"] if "content" in piece)
    return _adapted(reply_message(text, action_calls(action["data"])), own(step))


def action_calls(pieces: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of the tool calls among the pieces of an answer."""
    return [(piece["id"], piece["name"], piece["arguments"]) for piece in pieces if "id" in piece]


def chat_calls(calls: Any) -> list[tuple[str, str, str]]:
    """Id, name and arguments of tool calls in the chat-completions form, as far as they have it."""
    read = []
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            fields = (call.get("id"), function.get("name"), function.get("arguments"))
            if all(isinstance(value, str) for value in fields):
                read.append(fields)
    return read  # type: ignore[return-value]


def call_to_atif(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call; arguments whose text is no JSON object, or is spelt in another way, are kept as text."""
    call: dict[str, Any] = {"tool_call_id": call_id, "function_name": name, "arguments": _object(arguments)}
    ours = {} if _arguments_text(call) == arguments else {"arguments": arguments}
    return with_own(call, ours)


def llm_calls(step: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of the calls of a step that the LLM made, not the agent."""
    return [
        (call["tool_call_id"], call["function_name"], _arguments_text(call))
        for call in step.get("tool_calls") or ()
        if "command" not in own(call)
    ]


def content_to_atif(content: Any) -> str | list[dict[str, Any]]:
    """Content as ATIF has it; parts that it has no place for become text that names them."""
    if isinstance(content, str):
        return content
    return [_part_to_atif(part) for part in content] if isinstance(content, list | tuple) else ""


def content_from_atif(content: Any) -> Any:
    """Content as chat messages have it."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_part_from_atif(part) for part in content]


def _part_to_atif(part: Any) -> dict[str, Any]:
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return {"type": "text", "text": text}
    url = _image_url(part)
    kind = _IMAGE_TYPES.get("." + url.rpartition(".")[2].lower())
    if kind is not None and "://" in url:  # a local path would have to exist beside the document
        return {"type": "image", "source": {"media_type": kind, "path": url}}
    name = part.get("type") if isinstance(part, Mapping) else None
    return {"type": "text", "text": f"[{name if isinstance(name, str) else 'a part of the message'}]"}


def _image_url(part: Any) -> str:
    image = part.get("image_url") if isinstance(part, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else None
    return url if isinstance(url, str) else ""


def _part_from_atif(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": part["source"]["path"]}}
    return {"type": "text", "text": f"[audio: {part['source']['path']}]"}


def _with_calls(message: dict[str, Any], calls: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    if not calls:
        return message
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return message | {"content": message["content"] or None, "tool_calls": made}


def _difference(derived: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if name not in derived or freeze(derived[name]) != value}
    without = [name for name in derived if name not in message]
    return ({"message": fields} if fields else {}) | ({"without": without} if without else {})


def _adapted(derived: dict[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    without = ours.get("without", ())
    return {name: value for name, value in derived.items() if name not in without} | dict(ours.get("message", {}))


def _object(text: str) -> dict[str, Any]:
    """The object that `text` is the JSON of; an empty one where it is none."""
    try:
        read = json.loads(text)
        json.dumps(read, allow_nan=False)  # `NaN` and numbers too great for a float are no JSON
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _arguments_text(call: Mapping[str, Any]) -> str:
    text = own(call).get("arguments")
    return text if isinstance(text, str) else json.dumps(call["arguments"], ensure_ascii=False)
