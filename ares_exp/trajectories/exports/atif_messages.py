"""Conversion between chat messages and the steps of ATIF, the Agent Trajectory Interchange Format.

Also contains a schema that validates ATIF documents of versions 1.0 to 1.8. The schema has only the fields that this
package reads. `atif_writer` writes documents.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ares_exp.errors import TrajectoryFormatError, WireFormatError
from ares_exp.llms.chat_messages import arguments_object, call_part, calls_of
from ares_exp.records.validation import explain_validation
from ares_exp.trajectories.records import BROKEN, what_broke

OURS = "ares_exp"
"""Key in `extra` under which this package stores its own data in a document, step, tool call or result."""

BASH = "bash"

_IMAGE_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}


def own(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the data that `with_own` added to a document, step, tool call or result; empty if there is no data."""
    found = (item.get("extra") or {}).get(OURS)
    return found if isinstance(found, Mapping) else {}


def with_own(item: dict[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `item` that also contains `ours`, the data of this package, in its field `extra`."""
    return item | {"extra": {OURS: dict(ours)}} if ours else item


def step_of_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a chat message to an ATIF step without a `step_id`. Marks assistant messages as copied context."""
    role = message.get("role")
    step: dict[str, Any] = {
        "source": {"system": "system", "assistant": "agent"}.get(str(role), "user"),
        "message": content_to_atif(message.get("content")),
    }
    if role == "assistant":
        step |= {"llm_call_count": 0, "is_copied_context": True}
        if calls := chat_calls(message.get("tool_calls")):
            step["tool_calls"] = [call_to_atif(*call) for call in calls]
    return step


def message_of_step(step: Mapping[str, Any]) -> dict[str, Any]:
    """Converts an ATIF step to a chat message. The message of an agent step has only a text and tool calls."""
    content = content_from_atif(step["message"])
    if step["source"] != "agent":
        return {"role": step["source"], "content": content}
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return _with_calls({"role": "assistant", "content": text}, llm_calls(step))


def result_of_message(message: Mapping[str, Any], call_id: str | None) -> dict[str, Any]:
    """Converts a message with the output of a call or command to an ATIF result. `call_id` is `None` if unknown."""
    source = {} if call_id is None else {"source_call_id": call_id}
    return {**source, "content": content_to_atif(message.get("content"))}


def message_of_result(result: Mapping[str, Any], llm_call_ids: Collection[str]) -> dict[str, Any]:
    """Converts an ATIF result to a chat message.

    If `llm_call_ids` contains the id of the result's tool call, returns a tool message, otherwise a user message.
    """
    content = content_from_atif(result.get("content"))
    if (call_id := result.get("source_call_id")) in llm_call_ids:
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    return {"role": "user", "content": content}


def reply_message(action: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a response to the assistant message that agents then add to their conversation."""
    text = "".join(piece["content"] for piece in action["data"] if "content" in piece)
    return _with_calls({"role": "assistant", "content": text}, action_calls(action["data"]))


def action_calls(pieces: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Returns the id, name and arguments of each tool call among the pieces of a response."""
    return [(piece["id"], piece["name"], piece["arguments"]) for piece in pieces if "arguments" in piece]


def chat_calls(calls: Any) -> list[tuple[str, str, str]]:
    """Returns the id, name and arguments of each tool call in an assistant message. Skips malformed calls."""
    read: list[tuple[str, str, str]] = []
    for call in calls if isinstance(calls, Sequence) else ():
        with suppress(WireFormatError):
            read += [(one.id, one.name, one.arguments) for one in calls_of({"tool_calls": [call]})]
    return read


def call_to_atif(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Creates an ATIF tool call, whose arguments are an object instead of JSON text.

    If the original text cannot be recreated from the object, the tool call also contains the original text.
    """
    call: dict[str, Any] = {
        "tool_call_id": call_id,
        "function_name": name,
        "arguments": arguments_object(arguments) or {},
    }
    return with_own(call, {} if _arguments_text(call) == arguments else {"arguments": arguments})


def llm_calls(step: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the id, name and arguments of each tool call of the LLM in an ATIF step. Skips the agent's commands."""
    return [
        (call["tool_call_id"], call["function_name"], _arguments_text(call))
        for call in step.get("tool_calls") or ()
        if "command" not in own(call)
    ]


def content_to_atif(content: Any) -> str | list[dict[str, Any]]:
    """Converts the content of a chat message to ATIF. An unsupported part becomes a text such as `[audio]`."""
    if isinstance(content, str):
        return content
    return [_part_to_atif(part) for part in content] if isinstance(content, list | tuple) else ""


def content_from_atif(content: Any) -> Any:
    """Converts the content of an ATIF step or result to the content of a chat message."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_part_from_atif(part) for part in content]


def _part_to_atif(part: Any) -> dict[str, Any]:
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return {"type": "text", "text": text}
    image = part.get("image_url") if isinstance(part, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else None
    url = url if isinstance(url, str) else ""
    kind = _IMAGE_TYPES.get("." + url.rpartition(".")[2].lower())
    if kind is not None and "://" in url:  # a local path would have to exist next to the document
        return {"type": "image", "source": {"media_type": kind, "path": url}}
    name = part.get("type") if isinstance(part, Mapping) else None
    return {"type": "text", "text": f"[{name if isinstance(name, str) else 'a part of the message'}]"}


def _part_from_atif(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": part["source"]["path"]}}
    return {"type": "text", "text": f"[audio: {part['source']['path']}]"}


def _with_calls(message: dict[str, Any], calls: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    if not calls:
        return message
    return message | {"content": message["content"] or None, "tool_calls": [call_part(*call) for call in calls]}


def _arguments_text(call: Mapping[str, Any]) -> str:
    text = own(call).get("arguments")
    return text if isinstance(text, str) else json.dumps(call["arguments"], ensure_ascii=False)


NEWEST_VERSION = "ATIF-v1.8"
VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))

Extra = dict[str, Any] | None


def validate_atif(document: Any) -> None:
    """Validates the conversation in a parsed document. Raises a `TrajectoryFormatError` that names the field."""
    try:
        _Document.model_validate(document)
    except ValidationError as error:
        raise TrajectoryFormatError(f"The ATIF document is invalid: {explain_validation(error)}.") from None
    except BROKEN as error:
        raise TrajectoryFormatError(f"The ATIF document is invalid: {what_broke(error)}.") from None


class _Read(BaseModel):
    model_config = ConfigDict(strict=True)


class _Source(_Read):
    path: str


class _Text(_Read):
    type: Literal["text"]
    text: str


class _Media(_Read):
    type: Literal["image", "audio"]
    source: _Source


_Content = str | list[Annotated[_Text | _Media, Field(discriminator="type")]]


class _ToolCall(_Read):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: Extra = None


class _Result(_Read):
    source_call_id: str | None = None
    content: _Content | None = None


class _Observation(_Read):
    results: list[_Result]


class _Step(_Read):
    source: Literal["system", "user", "agent"]
    message: _Content
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    extra: Extra = None


class _Document(_Read):
    schema_version: Literal[VERSIONS] = NEWEST_VERSION  # type: ignore[valid-type]
    steps: Annotated[list[_Step], Field(min_length=1)]
