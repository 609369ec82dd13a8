import json
from typing import Any

import pytest
from hypothesis import given
from openai import APIError, BadRequestError, OpenAI

from ares_exp.agents.interception.served_formats import ChatCompletionsWire
from ares_exp.errors import WireFormatError
from ares_exp.llms.canonical import canonical_messages
from ares_exp.llms.chat_messages import reasoning_of_message
from ares_exp.llms.request import freeze
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from tests.canonical_response import canonical_response
from tests.drawn_responses import responses
from tests.examples import examples
from tests.wire_server import WireServer, event_data

WIRE = ChatCompletionsWire()
HELLO: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


OF_THE_CLIENT = ("parsed", "parsed_arguments", "index")
"""Fields that the client's own code adds when it puts a stream together."""


def bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items() if item is not None and key not in OF_THE_CLIENT}
    return [bare(item) for item in value] if isinstance(value, list) else value


@examples(25)
@given(responses)
def test_client_assembles_stream_into_the_whole_response(
    server: WireServer, client: OpenAI, response: LLMResponse
) -> None:
    server.response, server.keepalives = response, 2
    whole = client.chat.completions.create(**HELLO)
    with client.chat.completions.stream(**HELLO, stream_options={"include_usage": True}) as stream:
        streamed = stream.until_done().current_completion_snapshot
    (choice,) = whole.choices
    assert [bare(one.message.to_dict()) for one in streamed.choices] == [bare(choice.message.to_dict())]
    assert (streamed.choices[0].finish_reason, streamed.usage) == (choice.finish_reason, whole.usage)
    client.chat.completions.create(model="policy", messages=[*HELLO["messages"], choice.message.to_dict()])
    _, back = server.asked[-1].request.messages
    assert canonical_messages(server.asked[-1].request)[-1] == canonical_response(response, server.asked[-2].request)
    assert tuple(reasoning_of_message(back, pytest.fail)) == response.thinking


FULL = LLMResponse(
    [
        ThinkingData("hm", "seal"),
        TextData("look"),
        ToolCallData("c1", "bash", '{"command": "ls"}'),
        ToolCallData("c2", "Read", "{}"),
    ],
    cost=2.0,
    usage=Usage(10, 5, cached_tokens=4, cache_write_tokens=2, reasoning_tokens=3),
    completion_token_ids=[1, 2],
    logprobs=[-1.0, -2.0],
    model="the-real-name",
)


def test_stream_has_the_documented_order(server: WireServer) -> None:
    server.response, server.keepalives = FULL, 1
    asked = WIRE.read({**HELLO, "stream": True, "stream_options": {"include_usage": True}})
    written = server.written(WIRE, asked)
    assert written[1] == b": keepalive\n"
    assert written[-1] == b"data: [DONE]\n\n"
    *chunks, end, counts = event_data(b"".join(written))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant"},
        {"reasoning_content": "hm"},
        {"content": "look"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm", "signature": "seal"}]},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "bash", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"command": "ls"}'}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "type": "function", "function": {"name": "Read", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "tool_calls")
    assert (counts["choices"], counts["usage"]["prompt_tokens_details"]["cached_tokens"]) == ([], 4)
    assert {chunk["model"] for chunk in chunks} == {"policy"}
    assert b"the-real-name" not in b"".join(written)


def test_usage_ends_a_stream_only_on_request() -> None:
    asked = WIRE.read({**HELLO, "stream": True})
    assert all("usage" not in chunk for chunk in event_data(b"".join(WIRE.events(asked, FULL, 0))))


def test_body_contains_only_documented_fields() -> None:
    body = json.loads(WIRE.whole(WIRE.read(HELLO), FULL))
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert set(body["choices"][0]) == {"index", "message", "finish_reason"}
    assert "cost" not in body["usage"]


def test_call_ids_are_unique_in_the_conversation() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    asked = WIRE.read({**HELLO, "messages": HELLO["messages"] + said})
    response = LLMResponse([ToolCallData(name, "bash", "{}") for name in ("c1", "", "c9", "c9")])
    once, again = (
        [one["id"] for one in json.loads(WIRE.whole(asked, response))["choices"][0]["message"]["tool_calls"]]
        for _ in range(2)
    )
    assert once == again
    assert (once[2], len({"c1", *once})) == ("c9", 5)


def test_sampling_and_dropped_fields_are_named() -> None:
    asked = WIRE.read(
        {
            **HELLO,
            "max_tokens": 64_000,
            "temperature": 0,
            "reasoning_effort": "high",
            "stop": "END",
            "tools": [TOOL, {"type": "custom", "custom": {"name": "patch"}}],
            "tool_choice": "auto",
            "response_format": {"type": "json_object"},
            "metadata": {"user": "u"},
            "user": "",
            "web_search_options": {"a": 1},
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
                {"role": "user", "content": "hello", "cache_control": {"type": "ephemeral"}},
            ],
        },
    )
    request, origin = asked.request, asked.request.origin
    assert origin.sampling == {"max_tokens": 64_000, "temperature": 0, "reasoning_effort": "high"}
    assert origin.dropped == ("cache_control", "metadata", "response_format", "tools[custom]", "web_search_options")
    assert (request.max_output_tokens, request.temperature, request.metadata) == (None, None, None)
    assert (request.tools, request.tool_choice, request.stop_sequences) == ((TOOL,), "auto", ("END",))
    assert (request.system_prompt, request.messages) == ("s", (freeze({"role": "user", "content": "hello"}),))


def test_empty_tools_are_omitted() -> None:
    request = WIRE.read({**HELLO, "tools": [], "tool_choice": "auto"}).request
    assert (request.tools, request.tool_choice) == (None, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n": 2}, "`n` to be 1"),
        ({"messages": None}, "`messages`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/a"}}]}]},
            "data:",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]}, "`file_data`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "`tool_call_id`"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "`id`"),
        ({"tools": [{"type": "function"}]}, "`function`"),
        ({"stream_options": [1]}, "`stream_options`"),
    ],
)
def test_unsupported_fields_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(WireFormatError, match=named):
        WIRE.read({**HELLO, **change})


def test_refused_and_failed_requests_are_client_errors(server: WireServer, client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="a request has one response") as refused:
        client.chat.completions.create(**HELLO, n=2)
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", "n")
    server.fails_with = "the policy is gone"
    try:
        with pytest.raises(APIError, match="the policy is gone"):
            client.chat.completions.create(**HELLO)
    finally:
        server.fails_with = None
    assert server.keys[-1] == "key-1"
