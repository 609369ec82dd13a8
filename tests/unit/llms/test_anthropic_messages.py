"""Anthropic's Messages as the wire of a policy: requests written, answers read."""

import json
from typing import Any

import pytest
from hypothesis import given

from ares_exp.errors import MalformedResponseError, UnsendableRequestError
from ares_exp.llms.anthropic_messages import request_from_body, request_to_body, response_from_body, response_to_body
from ares_exp.llms.canonical import canonical
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from tests.drawn_responses import mixed_responses
from tests.examples import examples

TOOL = {"type": "function", "function": {"name": "ls", "description": "lists", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
FULL = LLMRequest(
    messages=[
        {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_details": [
                {"type": "reasoning.text", "text": "hm", "signature": "s"},
                {"type": "reasoning.encrypted", "data": "ZGF0YQ=="},
            ],
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        {"role": "user", "content": "go on"},
    ],
    max_output_tokens=100,
    temperature=0.5,
    top_k=4,
    stream=True,
    tools=[TOOL],
    tool_choice="required",
    metadata={"user_id": "7"},
    stop_sequences=["END"],
    system_prompt="be brief",
)


def test_request_is_written_to_the_wire() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    body = request_to_body(FULL, model="m")
    assert body == {
        "model": "m",
        "max_tokens": 100,
        "system": "be brief",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "source": source}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "ZGF0YQ=="},
                    {"type": "text", "text": "I look"},
                    {"type": "tool_use", "id": "c1", "name": "ls", "input": {"path": "."}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "a.txt"},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": [{"name": "ls", "description": "lists", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "temperature": 0.5,
        "top_k": 4,
        "stop_sequences": ["END"],
        "stream": True,
        "metadata": {"user_id": "7"},
    }
    again = request_from_body(json.loads(json.dumps(body)))
    assert again == FULL
    assert canonical(again) == canonical(FULL)


def test_leading_system_text_becomes_the_system_prompt() -> None:
    said = [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}]
    body = request_to_body(LLMRequest([*said, {"role": "system", "content": "c"}], system_prompt="s"), model="m")
    assert body["system"] == "s\n\na"
    assert [message["role"] for message in body["messages"]] == ["user", "system"]


def test_empty_messages_are_not_sent() -> None:
    said = [{"role": "user", "content": "b"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "c"}]
    (message,) = request_to_body(LLMRequest(said), model="m")["messages"]
    assert [block["text"] for block in message["content"]] == ["b", "c"]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "assistant", "content": "x", "reasoning_content": "hm"}, "without a signature"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "input_audio"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}, "file_data"),
    ],
)
def test_unsupported_content_is_named(message: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsendableRequestError, match=named):
        request_to_body(LLMRequest([message]), model="m")


@examples(40)
@given(mixed_responses)
def test_responses_round_trip(response: LLMResponse) -> None:
    again = response_from_body(json.loads(json.dumps(response_to_body(response))))
    assert [_comparable(piece) for piece in again.data] == [_comparable(piece) for piece in response.data]


def _comparable(piece: Any) -> Any:
    if isinstance(piece, ToolCallData):
        return piece.id, piece.name, json.loads(piece.arguments or "{}")
    return piece


def test_response_is_read() -> None:
    body = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [
            {"type": "thinking", "thinking": "", "signature": "s"},
            {"type": "text", "text": "hi"},
            {"type": "tool_use", "id": "t", "name": "ls", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_read_input_tokens": 20,
            "cache_creation_input_tokens": 300,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 5},
        },
    }
    assert response_from_body(body) == LLMResponse(
        [ThinkingData("", "s"), TextData("hi"), ToolCallData("t", "ls", "{}")],
        usage=Usage(321, 7, cached_tokens=20, cache_write_tokens=300, reasoning_tokens=5),
        finish_reason="tool_calls",
        model="claude",
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"content": None}, "`content`"),
        ({"content": [{"type": "server_tool_use", "id": "x"}]}, "server_tool_use"),
        ({"content": [{"type": "text"}]}, "`text`"),
        ({"usage": {"input_tokens": "many"}}, "`input_tokens`"),
        ({"usage": {"input_tokens": -1}}, "`input_tokens`"),
    ],
)
def test_malformed_response_is_named(change: dict[str, Any], named: str) -> None:
    body = {"role": "assistant", "content": [], "stop_reason": "end_turn", **change}
    with pytest.raises(MalformedResponseError, match=named):
        response_from_body(body)
