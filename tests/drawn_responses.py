"""Hypothesis strategies for the responses of policies: text, reasoning, tool calls; empty, huge, and in any script."""

import json
from typing import Any

from hypothesis import strategies as st

from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage

texts = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    ["", " ", "a\nb\r\n\r\ndata: x\n\n", "💡" * 9000, "x" * 40_000, "\u2028\x85", "[DONE]", "</think>", "\0"]
)
said = texts.filter(bool)
_scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e6, 1e6, width=32) | texts
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2), max_leaves=4
)
arguments = st.dictionaries(texts, _values, max_size=3).map(json.dumps) | st.just("")
ids = st.sampled_from(["", "c1", "call_2", "toolu_3"])
calls = st.builds(ToolCallData, ids, st.sampled_from(["bash", "Read", "mcp__x__y"]), arguments) | st.builds(
    ToolCallData, ids, st.just("apply_patch"), texts.map(lambda text: json.dumps({"input": text}))
)
thoughts = st.builds(ThinkingData, said, st.none() | said, st.booleans())


def _pieces(thinking: list[Any], text: list[str], called: list[Any]) -> list[Any]:
    return [*thinking, *map(TextData, text), *called]


usages = st.builds(Usage, *[st.integers(0, 10**6)] * 5)
responses = st.builds(
    LLMResponse,
    data=st.builds(_pieces, st.lists(thoughts, max_size=3), st.lists(texts, max_size=1), st.lists(calls, max_size=5)),
    cost=st.floats(0, 10),
    usage=usages,
    finish_reason=st.sampled_from([None, "stop", "length", "tool_calls", "content_filter"]),
)
"""Reasoning, one text, tool calls: what every wire has a place for, in this order."""

mixed_responses = st.builds(LLMResponse, data=st.lists(thoughts | st.builds(TextData, said) | calls, max_size=6))
"""Pieces in any order."""
