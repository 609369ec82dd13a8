"""Reasoning, text and calls of tools in what models write, by the families of their chat templates."""

import json
from typing import Any

import pytest

from ares_exp.llms.response import Piece, TextData, ThinkingData, ToolCallData
from ares_exp.policies.in_process.chat_template import pieces_of

PARAMETERS = {"properties": {"command": {"type": "string"}, "count": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]
HERMES = "<tool_call> … </think>"
CODER = "<tool_call> <function= …"
MISTRAL = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"


def read(text: str, template: str, *, tools: Any = TOOLS, starts_thinking: bool = False) -> list[Piece]:
    return pieces_of(text, template, tools, call_id="call", starts_thinking=starts_thinking)


def call(number: int = 0, **arguments: Any) -> ToolCallData:
    return ToolCallData(f"call_{number}", "bash", json.dumps(arguments))


LS = '{"name": "bash", "arguments": {"command": "ls"}}'


@pytest.mark.parametrize(
    ("template", "text", "pieces"),
    [
        (HERMES, "Only text.", [TextData("Only text.")]),
        (HERMES, "", [TextData("")]),
        (HERMES, f"Look.\n<tool_call>\n{LS}\n</tool_call>", [TextData("Look."), call(command="ls")]),
        (
            HERMES,
            f"<tool_call>{LS}</tool_call>\n<tool_call>{LS}</tool_call>",
            [call(command="ls"), call(1, command="ls")],
        ),
        (HERMES, "<tool_call>{broken</tool_call>", [TextData("<tool_call>{broken</tool_call>")]),
        (HERMES, '<tool_call>{"name": 3}</tool_call>', [TextData('<tool_call>{"name": 3}</tool_call>')]),
        (HERMES, f"<think>\nHm.\n</think>\n\n<tool_call>{LS}</tool_call>", [ThinkingData("Hm."), call(command="ls")]),
        (HERMES, "<think>\nwithout an end", [ThinkingData("without an end")]),
        (
            CODER,
            "So:\n<tool_call>\n<function=bash>\n<parameter=command>\n12\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
            [TextData("So:"), call(command="12", count=3)],
        ),
        (CODER, "<tool_call><function=</tool_call>", [TextData("<tool_call><function=</tool_call>")]),
        (MISTRAL, f"Look.[TOOL_CALLS][{LS}]", [TextData("Look."), call(command="ls")]),
        (MISTRAL, '[TOOL_CALLS]bash[ARGS]{"command": "ls"}', [call(command="ls")]),
        (MISTRAL, '[TOOL_CALLS]bash[ARGS]{"command"', [TextData('[TOOL_CALLS]bash[ARGS]{"command"')]),
        (LLAMA, '<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}', [call(command="ls")]),
        (LLAMA, '{"name": "bash"} and more', [TextData('{"name": "bash"} and more')]),
        ("no marks at all", f"<tool_call>{LS}</tool_call>", [TextData(f"<tool_call>{LS}</tool_call>")]),
    ],
)
def test_text_is_parsed_into_pieces(template: str, text: str, pieces: list[Piece]) -> None:
    assert read(text, template) == pieces


def test_text_without_tools_has_no_calls() -> None:
    assert read(f"<tool_call>{LS}</tool_call>", HERMES, tools=None) == [TextData(f"<tool_call>{LS}</tool_call>")]


def test_reasoning_started_by_the_prompt_is_parsed() -> None:
    assert read("Hm.\n</think>\n\nYes.", HERMES, starts_thinking=True) == [ThinkingData("Hm."), TextData("Yes.")]
    assert read("Hm.</think>", HERMES) == [TextData("Hm.</think>")]
