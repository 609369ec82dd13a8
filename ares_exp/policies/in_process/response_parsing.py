"""Parsing of a model's text into reasoning, text and tool calls, in the format that its chat template uses.

The format of tool calls belongs to one of four families, which markers in the template identify. A call that cannot be
parsed remains text, so that the agent sees it.

| family | format of a tool call |
|---|---|
| `hermes` (Hermes, Qwen 2.5, Qwen 3) | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` |
| `qwen_coder` (Qwen 3 Coder) | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>` |
| `mistral` | `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]NAME[ARGS]{…}` |
| `llama` (Llama 3.1 and later) | the whole text is `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ares_exp.llms.response import Piece, TextData, ThinkingData, ToolCallData

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?\[ARGS\]\s*", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"


Found = tuple[str, list[ToolCallData]]
"""Result of parsing a text: the text without its tool calls, and the tool calls, whose ids are still empty."""


def pieces_of(
    text: str, template: str, tools: Sequence[Mapping[str, Any]] | None, *, call_id: str, starts_thinking: bool
) -> list[Piece]:
    """Parses the text of a response into pieces: reasoning, text and tool calls.

    Args:
        text: Generated text without the token that ended it.
        template: Source of the chat template.
        tools: Tools that the request offers. If it offers no tools, the text of tool calls remains text.
        call_id: Prefix of the ids of tool calls.
        starts_thinking: Whether the prompt ends with an open reasoning block, so that the text starts with reasoning.
    """
    thinking, said = _thinking(text, template, starts_thinking)
    left, calls = said, list[ToolCallData]()
    find = next((read for mark, read in _FAMILIES if mark in template), None)
    if tools and find is not None:
        left, calls = find(said, tools)
    pieces: list[Piece] = [ThinkingData(thinking)] if thinking.strip() else []
    if left.strip() or not (calls or pieces):
        pieces.append(TextData(left.strip() if calls else left))
    return pieces + [replace(one, id=f"{call_id}_{number}") for number, one in enumerate(calls)]


def _thinking(text: str, template: str, starts_thinking: bool) -> tuple[str, str]:
    """Returns the reasoning and the rest of the text. An unclosed reasoning block extends to the end of the text."""
    if "</think>" not in template:
        return "", text
    stripped = text.lstrip()
    if stripped.startswith("<think>"):
        inside = stripped.removeprefix("<think>")
    elif starts_thinking:
        inside = text
    else:
        return "", text
    thought, _, said = inside.partition("</think>")
    return thought.strip("\n"), said.lstrip("\n")


def _hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    return _in_blocks(text, lambda block: _json_calls(block, "arguments"))


def _qwen_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    def read(block: str) -> list[ToolCallData]:
        found = _FUNCTION.fullmatch(block)
        if found is None:
            return []
        kinds = _kinds(found[1], tools)
        arguments = {name: _typed(value, kinds.get(name)) for name, value in _PARAMETER.findall(found[2])}
        return [ToolCallData("", found[1], json.dumps(arguments, ensure_ascii=False))]

    return _in_blocks(text, read)


def _mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    before, mark, after = text.partition(_MISTRAL)
    if not mark:
        return text, []
    calls: list[ToolCallData] = []
    for part in after.split(_MISTRAL):
        named = _NAMED.match(part)
        found = _one(named[1], part[named.end() :]) if named else _json_calls(part, "arguments")
        if not found:
            return text, []
        calls += found
    return before, calls


def _llama(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    found = _json_calls(text.strip().removeprefix(_PYTHON_TAG), "parameters")
    return ("", found) if found else (text, [])


_FAMILIES: Sequence[tuple[str, Callable[[str, Sequence[Mapping[str, Any]]], Found]]] = (
    ("<function=", _qwen_coder),
    ("<tool_call>", _hermes),
    (_MISTRAL, _mistral),
    (_PYTHON_TAG, _llama),
    ('"parameters": ', _llama),
)
"""The marker of each family in chat templates, and the function that finds its tool calls. The first marker counts."""


def _in_blocks(text: str, read: Callable[[str], list[ToolCallData]]) -> Found:
    calls: list[ToolCallData] = []

    def take(block: re.Match[str]) -> str:
        found = read(block[1])
        calls.extend(found)
        return "" if found else block[0]

    left = _BLOCK.sub(take, text)
    return left, calls


def _json_calls(text: str, arguments_field: str) -> list[ToolCallData]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    entries = value if isinstance(value, list) else [value]
    calls = [_json_call(entry, arguments_field) for entry in entries]
    return [call for call in calls if call is not None] if all(calls) else []


def _json_call(entry: Any, arguments_field: str) -> ToolCallData | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get(arguments_field, entry.get("arguments", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCallData("", entry["name"], text)


def _one(name: str, arguments: str) -> list[ToolCallData]:
    try:
        return [ToolCallData("", name, json.dumps(json.loads(arguments), ensure_ascii=False))]
    except (ValueError, RecursionError):
        return []


def _kinds(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: one.get("type") for key, one in properties.items() if isinstance(one, Mapping)}
    return {}


def _typed(value: str, kind: Any) -> Any:
    """Parses a parameter as JSON, unless its schema has the type string. A value that is not JSON remains a text."""
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
