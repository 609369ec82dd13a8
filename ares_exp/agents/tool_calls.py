"""Definitions of the tools agent's tools (`bash`, `edit`, `submit`), and validation of the calls in a response."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ares_exp.llms.chat_messages import call_part, function_tool
from ares_exp.llms.request import Message
from ares_exp.llms.response import LLMResponse, ToolCallData

ToolName = Literal["bash", "edit", "submit"]

_DEFINITIONS: Mapping[ToolName, tuple[str, Mapping[str, Any], Sequence[str]]] = {
    "bash": (
        "Runs a command in a fresh bash. The working directory and variables of earlier commands are not kept, but "
        "files are. Returns the exit code and the output. The command gets no input: use options that do not prompt.",
        {
            "command": {"type": "string", "description": "The command; several lines are allowed."},
            "timeout_sec": {"type": "number", "description": "Seconds after which it is stopped. Optional."},
        },
        ["command"],
    ),
    "edit": (
        "Views, creates and edits text files.\n"
        "* `view`: a file with line numbers, or a directory with its content, two levels deep.\n"
        "* `create`: writes `file_text` to a file; an existing file is overwritten.\n"
        "* `str_replace`: replaces `old_str`, which must be in the file exactly once, whitespace included, by "
        "`new_str`.\n"
        "* `insert`: inserts `insert_text` after the line `insert_line`.",
        {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            "path": {"type": "string", "description": "Path of the file or directory, preferably absolute."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For `view` of a file: first and last line, from 1 on; -1 is the last one.",
            },
            "file_text": {"type": "string", "description": "For `create`: the content."},
            "old_str": {"type": "string", "description": "For `str_replace`: the text to replace."},
            "new_str": {"type": "string", "description": "For `str_replace`: the new text; empty if left out."},
            "insert_line": {"type": "integer", "description": "For `insert`: the line, 0 for the file's start."},
            "insert_text": {"type": "string", "description": "For `insert`: the text."},
        },
        ["command", "path"],
    ),
    "submit": (
        "Ends the work: the task is done. Call only this tool, after you have checked the result.",
        {},
        [],
    ),
}

_OTHER_NAMES = {"str_replace_based_edit_tool": "edit", "str_replace_editor": "edit"}
"""Other accepted names of the tools. Some models were trained with these names and use them anyway."""


def definitions(tools: Sequence[ToolName]) -> list[dict[str, Any]]:
    """Returns the definitions of the given tools for the LLM, in the chat-completions format."""
    made = []
    for name in tools:
        text, properties, required = _DEFINITIONS[name]
        schema = {"type": "object", "properties": dict(properties), "required": list(required)}
        made.append(function_tool(name, text, schema))
    return made


@checked_dataclass(frozen=True)
class BashCall:
    """A valid call to `bash`, which runs a command."""

    command: str
    timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


@checked_dataclass(frozen=True)
class EditCall:
    """A valid call to `edit`. `insert` uses `insert_text` or, as in older versions of this tool, `new_str`."""

    command: Literal["view", "create", "str_replace", "insert"]
    path: Annotated[str, Field(min_length=1)]
    view_range: tuple[int, int] | None = None
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: Annotated[int, Field(ge=0)] | None = None
    insert_text: str | None = None


@checked_dataclass(frozen=True)
class SubmitCall:
    """A call to `submit`, which ends the agent's work."""


@dataclass(frozen=True, slots=True)
class UnusableCall:
    """A call to an unknown tool or with invalid arguments, which is not executed. `why` explains this to the LLM."""

    why: str


@dataclass(frozen=True, slots=True)
class McpCall:
    """A call to a tool of an MCP server.

    Attributes:
        name: Name of the tool as offered to the LLM, such as `mcp__SERVER__TOOL`.
        arguments: Arguments of the call. Only the server validates them.
    """

    name: str
    arguments: Mapping[str, Any]


class ToolError(Exception):
    """A tool call failed. The message explains the reason to the LLM."""


Call = BashCall | EditCall | SubmitCall | McpCall | UnusableCall
_READERS: Mapping[str, TypeAdapter[Any]] = {
    "bash": TypeAdapter(BashCall),
    "edit": TypeAdapter(EditCall),
    "submit": TypeAdapter(SubmitCall),
}


def read_call(piece: ToolCallData, tools: Sequence[ToolName], mcp_tools: Collection[str] = ()) -> Call:
    """Validates a call. Returns an `UnusableCall` if the tool was not offered or the arguments are invalid.

    `tools` and `mcp_tools` contain the names of the offered tools. Unknown arguments of `tools` are ignored.
    """
    name = _OTHER_NAMES.get(piece.name, piece.name)
    if name not in tools and name not in mcp_tools:
        return UnusableCall(f"There is no tool {piece.name!r:.60}. The tools are: {', '.join(tools)}.")
    try:
        arguments = json.loads(piece.arguments or "{}")
    except (ValueError, RecursionError) as error:
        return UnusableCall(f"The arguments of {name} are not valid JSON: {error}.")
    if name in mcp_tools:
        is_object = isinstance(arguments, dict)
        return (
            McpCall(name, arguments) if is_object else UnusableCall(f"The arguments of {name} are not a JSON object.")
        )
    try:
        call: Call = _READERS[name].validate_python(arguments)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'all'}: {one['msg']}" for one in error.errors())
        return UnusableCall(f"The arguments of {name} do not match the schema: {wrong}.")
    return call


def as_message(response: LLMResponse, first_number: int) -> tuple[Message, list[ToolCallData]]:
    """Converts a response to a message for the next request. Also returns the tool calls in the message.

    Args:
        response: Response from the LLM. The message omits the reasoning, which the policy adds if the endpoint needs
            it.
        first_number: Number of the first call in the response, counted from the start of the episode. A call whose id
            is missing or not unique in the response gets its number as the id, such as `call_7`.
    """
    calls: list[ToolCallData] = []
    for place, call in enumerate(piece for piece in response.data if isinstance(piece, ToolCallData)):
        known = {other.id for other in calls}
        call_id = call.id if call.id and call.id not in known else f"call_{first_number + place}"
        calls.append(ToolCallData(call_id, call.name, call.arguments))
    message: dict[str, Any] = {"role": "assistant", "content": response.text or None}
    if calls:
        message["tool_calls"] = [call_part(call.id, call.name, call.arguments) for call in calls]
    return Message(message if calls else {**message, "content": response.text}), calls
