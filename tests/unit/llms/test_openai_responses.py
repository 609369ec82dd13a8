"""OpenAI's Responses as the wire of a policy: requests written, answers read."""

import json
from typing import Any

import pytest
from hypothesis import given

from ares_exp.errors import MalformedResponseError, UnsendableRequestError
from ares_exp.llms.openai_responses import request_from_body, request_to_body, response_from_body, response_to_body
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from tests.drawn_responses import mixed_responses
from tests.examples import examples

TOOL = {"type": "function", "function": {"name": "ls", "description": "lists", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path":"."}'}}
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
    ],
    max_output_tokens=100,
    temperature=0.5,
    stream=True,
    tools=[TOOL],
    tool_choice={"type": "function", "function": {"name": "ls"}},
    metadata={"episode": "7"},
    system_prompt="be brief",
)


def test_request_is_written_to_the_wire() -> None:
    body = request_to_body(FULL, model="m")
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
    assert body == {
        "model": "m",
        "instructions": "be brief",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}, image]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "s"},
            {"type": "reasoning", "summary": [], "encrypted_content": "ZGF0YQ=="},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "ls",
                "arguments": '{"path":"."}',
                "status": "completed",
            },
            {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        ],
        "tools": [
            {
                "type": "function",
                "name": "ls",
                "description": "lists",
                "parameters": {"type": "object"},
                "strict": False,
            }
        ],
        "tool_choice": {"type": "function", "name": "ls"},
        "max_output_tokens": 100,
        "temperature": 0.5,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "stream": True,
        "metadata": {"episode": "7"},
    }
    assert request_from_body(json.loads(json.dumps(body))) == FULL


def test_unsealed_reasoning_is_sent_as_text() -> None:
    message = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    reasoning, _ = request_to_body(LLMRequest([message]), model="m")["input"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert "encrypted_content" not in reasoning


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (LLMRequest([], stop_sequences=["END"]), "`stop_sequences`"),
        (LLMRequest([], top_k=1), "`top_k`"),
        (LLMRequest([], metadata={"n": 1}), "`n` of the metadata"),
        (LLMRequest([{"role": "user", "content": [{"type": "input_audio"}]}]), "input_audio"),
        (LLMRequest([], tools=[{"type": "custom", "custom": {}}]), "all `tools` to have the type function"),
    ],
)
def test_unsupported_content_is_named(request_: LLMRequest, named: str) -> None:
    with pytest.raises(UnsendableRequestError, match=named):
        request_to_body(request_, model="m")


@examples(40)
@given(mixed_responses)
def test_responses_round_trip(response: LLMResponse) -> None:
    again = response_from_body(json.loads(json.dumps(response_to_body(response))))
    assert again.data == response.data


def test_response_is_read() -> None:
    def item(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "id": "x", **fields}

    text = {"type": "output_text", "text": "hi", "annotations": []}
    body = {
        "id": "resp_1",
        "status": "completed",
        "model": "gpt",
        "output": [
            item("reasoning", summary=[], encrypted_content="ZGF0YQ=="),
            item("message", role="assistant", status="completed", content=[text]),
            item("function_call", call_id="c", name="ls", arguments="{}", status="completed"),
        ],
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 4},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 5},
            "total_tokens": 17,
        },
    }
    assert response_from_body(body) == LLMResponse(
        [ThinkingData("ZGF0YQ==", redacted=True), TextData("hi"), ToolCallData("c", "ls", "{}")],
        usage=Usage(10, 7, cached_tokens=4, reasoning_tokens=5),
        finish_reason="tool_calls",
        model="gpt",
    )


@pytest.mark.parametrize(
    ("change", "finish"),
    [
        ({"status": "completed"}, "stop"),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "content_filter"),
    ],
)
def test_finish_reasons_are_read(change: dict[str, Any], finish: str) -> None:
    assert response_from_body({"output": [], **change}).finish_reason == finish


def test_refusal_is_text() -> None:
    part = {"type": "refusal", "refusal": "no"}
    body = {"status": "completed", "output": [{"type": "message", "role": "assistant", "content": [part]}]}
    response = response_from_body(body)
    assert (response.text, response.finish_reason) == ("no", "refusal")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"output": None}, "`output`"),
        ({"status": "failed", "error": {"message": "overloaded"}}, "overloaded"),
        ({"output": [{"type": "web_search_call"}]}, "web_search_call"),
        ({"output": [{"type": "function_call", "call_id": "c"}]}, "`name`"),
        ({"usage": {"input_tokens": -1}}, "`input_tokens`"),
    ],
)
def test_malformed_response_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(MalformedResponseError, match=named):
        response_from_body({"output": [], "status": "completed", **change})
