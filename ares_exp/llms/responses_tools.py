"""Conversion of tools and tool calls between OpenAI's Responses API and the chat-completions format.

| in the Responses API | in the chat-completions format |
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ares_exp.llms.chat_messages import arguments_object, function_tool, tool_name
from ares_exp.llms.response import ToolCallData
from ares_exp.llms.wire import Report, WireFormatError, check_keys, list_of, optional, plain, required, shorten


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
