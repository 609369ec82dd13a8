"""When two requests ask the same."""

from dataclasses import replace
from typing import Any

import pytest

from ares_exp.llms.canonical import canonical, canonical_messages
from ares_exp.llms.request import LLMRequest, Origin
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData
from tests.canonical_response import canonical_response


def call(call_id: str, arguments: str, name: str = "ls") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b")]
SAID = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "content": None, "tool_calls": [call("c1", '{"path": ".", "n": 1}'), call("c2", "")]},
    {"role": "tool", "tool_call_id": "c2", "content": "b.txt"},
    {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
]
BASE = LLMRequest(SAID, tools=TOOLS, system_prompt="be brief", tool_choice="auto")


def with_message(index: int, **fields: Any) -> LLMRequest:
    messages = list(SAID)
    messages[index] = {**messages[index], **fields}
    return replace(BASE, messages=messages)


SAME = {
    "a list with one text": with_message(0, content=[text("look", cache_control={"type": "ephemeral"})]),
    "neighbouring texts": with_message(0, content=[text("lo"), text("ok")]),
    "empty texts and fields": with_message(1, content="", refusal=None, annotations=[]),
    "the spelling of arguments": with_message(1, tool_calls=[call("c1", '{"n":1.0,"path":"."}'), call("c2", "{}")]),
    "ids": replace(
        BASE,
        messages=[
            SAID[0],
            {"role": "assistant", "tool_calls": [call("x", '{"path": ".", "n": 1}'), call("y", "")]},
            {"role": "tool", "tool_call_id": "y", "content": "b.txt"},
            {"role": "tool", "tool_call_id": "x", "content": "a.txt"},
        ],
    ),
    "reasoning": with_message(1, reasoning_content="hm", reasoning_details=[{"type": "reasoning.text", "text": "hm"}]),
    "the order of tools": replace(BASE, tools=TOOLS[::-1]),
    "the position of the system prompt": replace(
        BASE, system_prompt=None, messages=[{"role": "system", "content": [text("be brief")]}, *SAID]
    ),
    "stream, metadata, sampling, origin": replace(
        BASE,
        stream=True,
        metadata={"user_id": "u"},
        temperature=1.0,
        max_output_tokens=5,
        origin=Origin("messages", conversation="x", dropped=("y",)),
    ),
}
OTHER = {
    "a text": with_message(0, content="look!"),
    "a role": with_message(0, role="developer"),
    "an image": with_message(0, content=[text("look"), {"type": "image_url", "image_url": {"url": "data:"}}]),
    "arguments": with_message(1, tool_calls=[call("c1", '{"path": ".", "n": 2}'), call("c2", "")]),
    "text arguments": with_message(1, tool_calls=[call("c1", '{"path": ".", "n": 1'), call("c2", "")]),
    "the call of the result": replace(
        BASE, messages=[*SAID[:2], {**SAID[2], "tool_call_id": "c1"}, {**SAID[3], "tool_call_id": "c2"}]
    ),
    "tools": replace(BASE, tools=TOOLS[:1]),
    "the tool choice": replace(BASE, tool_choice="required"),
    "stop": replace(BASE, stop_sequences=["END"]),
    "the system prompt": replace(BASE, system_prompt="be long"),
    "an additional message": replace(BASE, messages=[*SAID, {"role": "user", "content": ""}]),
}


@pytest.mark.parametrize("what", SAME)
def test_equivalent_requests_have_the_same_fingerprint(what: str) -> None:
    assert canonical(SAME[what]).fingerprint == canonical(BASE).fingerprint
    assert canonical(SAME[what]) == canonical(BASE)


@pytest.mark.parametrize("what", OTHER)
def test_different_requests_have_different_fingerprints(what: str) -> None:
    assert canonical(OTHER[what]).fingerprint != canonical(BASE).fingerprint
    assert len({canonical(other).fingerprint for other in OTHER.values()}) == len(OTHER)


def test_conversation_is_continued_by_a_longer_one() -> None:
    whole = canonical(BASE)
    for length in range(len(SAID) + 1):
        part = canonical(replace(BASE, messages=SAID[:length]))
        assert whole.continues(part)
        assert part.continues(whole) is (length == len(SAID))
    other = canonical(OTHER["arguments"])
    assert not whole.continues(other)


def test_repeated_response_matches_its_message() -> None:
    asked = replace(BASE, messages=SAID)
    response = LLMResponse([ThinkingData("hm"), TextData("a"), ToolCallData("", "ls", "{}"), TextData("b")])
    message = {"role": "assistant", "content": [text("ab")], "tool_calls": [call("whatever", "")]}
    assert canonical_messages(replace(BASE, messages=[*SAID, message]))[-1] == canonical_response(response, asked)


def test_normalised_messages_are_compared() -> None:
    other = with_message(2, content="b.txt at 12:00")
    assert canonical(other).fingerprint != canonical(BASE).fingerprint

    def timeless(message: Any) -> Any:
        return {**message, "content": str(message.get("content")).removesuffix(" at 12:00")}

    assert canonical(other, timeless).fingerprint == canonical(BASE, timeless).fingerprint
