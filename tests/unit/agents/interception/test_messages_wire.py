from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given

from ares_exp.agents.interception.served_formats import MessagesWire
from ares_exp.errors import WireFormatError
from ares_exp.llms.canonical import canonical_messages
from ares_exp.llms.chat_messages import reasoning_of_message
from ares_exp.llms.request import freeze
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from tests.canonical_response import canonical_response
from tests.drawn_responses import mixed_responses, responses
from tests.examples import examples
from tests.wire_server import WireServer, event_data

if TYPE_CHECKING:
    from anthropic import Anthropic

WIRE = MessagesWire()
HELLO: dict[str, Any] = {"model": "policy", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def client(server: WireServer) -> Iterator[Anthropic]:
    from anthropic import Anthropic  # a second: not of everyone who collects the tests

    with Anthropic(base_url=server.url, api_key="key-1", max_retries=0) as client:
        yield client


@examples(25)
@given(responses | mixed_responses)
def test_client_assembles_stream_into_the_whole_response(
    server: WireServer, client: Anthropic, response: LLMResponse
) -> None:
    server.response, server.keepalives = response, 2
    whole = client.messages.create(**HELLO)
    with client.messages.stream(**HELLO) as stream:
        streamed = stream.get_final_message()
    told = whole.to_dict()
    assert {**streamed.to_dict(), "id": ""} == {**told, "id": ""}
    repeated: Any = {"role": "assistant", "content": told["content"]}
    client.messages.create(**{**HELLO, "messages": [*HELLO["messages"], repeated]})
    asked = server.asked[-1]
    assert canonical_messages(asked.request)[-1] == canonical_response(response, server.asked[-2].request)
    assert tuple(reasoning_of_message(asked.request.messages[-1], pytest.fail)) == response.thinking
    assert asked.request.origin.dropped == ()


FULL = LLMResponse(
    [
        ThinkingData("hm", "seal"),
        ThinkingData("c2VhbGVk", redacted=True),
        TextData("look"),
        ToolCallData("c1", "bash", '{"command": "ls"}'),
        ToolCallData("c2", "bash", "{broken"),
    ],
    usage=Usage(10, 5, cached_tokens=4, cache_write_tokens=2, reasoning_tokens=3),
)


def test_stream_has_the_documented_order(server: WireServer) -> None:
    server.response, server.keepalives = FULL, 1
    asked = WIRE.read({**HELLO, "stream": True})
    written = b"".join(server.written(WIRE, asked))
    events = event_data(written)
    names = [line[7:] for line in written.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert names[:2] == ["message_start", "ping"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    blocks = [event for event in events if event["type"].startswith("content_block")]
    assert [(event["type"][14:], event["index"]) for event in blocks[:4]] == [
        ("start", 0),
        ("delta", 0),
        ("delta", 0),
        ("stop", 0),
    ]
    starts = [event["content_block"] for event in blocks if event["type"] == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "redacted_thinking", "data": "c2VhbGVk"},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "c1", "name": "bash", "input": {}},
        {"type": "tool_use", "id": "c2", "name": "bash", "input": {}},
    ]
    deltas = [event["delta"] for event in blocks if event["type"] == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "signature_delta", "signature": "seal"},
        {"type": "text_delta", "text": "look"},
        {"type": "input_json_delta", "partial_json": '{"command":"ls"}'},
        {"type": "input_json_delta", "partial_json": '{"invalid_arguments":"{broken"}'},
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 2,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 3},
    }
    assert events[-1] == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("finish", "stop"),
    [("stop", "end_turn"), ("length", "max_tokens"), ("content_filter", "refusal"), (None, "end_turn")],
)
def test_finish_reasons_are_converted(finish: str | None, stop: str) -> None:
    whole = json.loads(WIRE.whole(WIRE.read(HELLO), LLMResponse.from_text("x", finish_reason=finish)))
    assert whole["stop_reason"] == stop


def test_sampling_and_dropped_fields_are_named() -> None:
    mark = {"type": "ephemeral"}
    result = {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": "no", "cache_control": mark}
    body = {
        **HELLO,
        "temperature": 1,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high", "format": {"type": "json_schema"}},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["END"],
        "context_management": {"edits": [{"type": "clear"}]},
        "tools": [
            {"name": "Bash", "input_schema": {"type": "object"}, "defer_loading": True},
            {"type": "web_search_20260209", "name": "web_search"},
        ],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "system": [{"type": "text", "text": "one", "cache_control": mark}, {"type": "text", "text": "two"}],
        "messages": [{"role": "user", "content": [result, {"type": "container_upload", "file_id": "f"}]}],
    }
    request = WIRE.read(body).request
    assert request.origin.sampling == {name: freeze(body[name]) for name in request.origin.sampling}
    assert set(request.origin.sampling) == {"max_tokens", "temperature", "thinking", "output_config"}
    assert request.origin.dropped == (
        *("cache_control", "content[container_upload]", "context_management", "defer_loading"),
        *("disable_parallel_tool_use", "is_error", "metadata", "output_config.format"),
        "tools[web_search_20260209]",
    )
    assert (request.max_output_tokens, request.temperature, request.metadata) == (None, None, None)
    assert (request.system_prompt, request.tool_choice, request.stop_sequences) == ("one\n\ntwo", "required", ("END",))
    assert request.tools is not None
    assert [tool["function"]["name"] for tool in request.tools] == ["Bash"]
    assert request.messages == (freeze({"role": "tool", "tool_call_id": "c1", "content": "no"}),)


def said(block: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [block]}


PNG = {"type": "base64", "media_type": "image/png", "data": "AA=="}


def test_messages_are_read_as_chat_messages() -> None:
    body = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": PNG}]},
        {"role": "system", "content": [{"type": "text", "text": "be quick"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "c1", "name": "Read", "input": {"é": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "next"},
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": PNG}]},
            ],
        },
    ]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert WIRE.read({**HELLO, "messages": body}).request.messages == freeze(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
            {"role": "system", "content": "be quick"},
            {
                "role": "assistant",
                "content": "x",
                "reasoning_details": [{"type": "reasoning.text", "text": "hm", "signature": "s"}],
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "Read", "arguments": '{"é": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [image]},
            {"role": "user", "content": "next"},
        ]
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": 1}, "`messages`"),
        ({"messages": [{"role": "tool", "content": ""}]}, "`role`"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
                ]
            },
            "data:",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, "`source`"),
        ({"messages": [said({"type": "tool_result"})]}, "`tool_use_id`"),
        ({"tools": [{"name": "x"}]}, "`input_schema`"),
        ({"stream": "yes"}, "`stream`"),
    ],
)
def test_unsupported_fields_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(WireFormatError, match=named):
        WIRE.read({**HELLO, **change})


def test_refused_and_failed_requests_are_client_errors(server: WireServer, client: Anthropic) -> None:
    from anthropic import APIStatusError, BadRequestError

    with pytest.raises(BadRequestError, match="Expected `role`"):
        client.messages.create(**{**HELLO, "messages": [{"role": "x", "content": ""}]})
    server.fails_with = "the policy is gone"
    try:
        with pytest.raises(APIStatusError, match="the policy is gone"):
            client.messages.create(**HELLO)
    finally:
        server.fails_with = None
    assert server.keys[-1] == "key-1"


def test_token_count_grows_with_text_not_images(client: Anthropic) -> None:
    def count(*content: Any) -> int:
        counted = client.messages.count_tokens(model="policy", messages=[{"role": "user", "content": [*content]}])
        return counted.input_tokens

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 400_000}}
    short, long = count({"type": "text", "text": "a" * 40}), count({"type": "text", "text": "a b " * 1000})
    assert 10 < short < long < 2 * 1000 + short
    assert count(image) < 2000
