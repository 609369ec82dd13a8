import json
from typing import Any

import pytest
from hypothesis import given
from openai import BadRequestError, InternalServerError, OpenAI

from ares_exp.agents.interception.served_formats import ResponsesWire
from ares_exp.errors import WireFormatError
from ares_exp.llms.canonical import canonical_messages
from ares_exp.llms.chat_messages import reasoning_of_message
from ares_exp.llms.request import freeze
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from tests.canonical_response import canonical_response
from tests.drawn_responses import mixed_responses, responses
from tests.examples import examples
from tests.wire_server import WireServer, event_data

WIRE = ResponsesWire()
TOOLS: Any = [
    {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "patches",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
    },
    {
        "type": "namespace",
        "name": "mcp__x__",
        "description": "of x",
        "tools": [{"type": "function", "name": "y", "description": "does y", "parameters": {"type": "object"}}],
    },
]
HELLO: dict[str, Any] = {"model": "policy", "input": "hello", "tools": TOOLS, "store": False}


def said(output: Any) -> list[dict[str, Any]]:
    """What output items say, without their ids, which are made for each response, and the client's additions."""
    items = [item.to_dict() for item in output]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    left_out = ("id", "parsed_arguments")
    return [{key: value for key, value in item.items() if key not in left_out} for item in items]


def put_together(stream: Any) -> tuple[Any, list[Any]]:
    """The response of the last event, and the items as those before it tell them."""
    items, last = [], None
    for last in stream:
        if last.type == "response.output_item.done":
            items.append(last.item)
    return last.response, items


@examples(25)
@given(responses | mixed_responses)
def test_client_assembles_stream_into_the_whole_response(
    server: WireServer, client: OpenAI, response: LLMResponse
) -> None:
    server.response, server.keepalives = response, 2
    whole = client.responses.create(**HELLO)
    with client.responses.stream(**HELLO) as stream:
        streamed, items = put_together(stream)
    assert said(streamed.output) == said(items) == said(whole.output)
    assert (streamed.status, streamed.usage) == (whole.status, whole.usage)
    given: Any = [{"role": "user", "content": "hello"}, *whole.to_dict()["output"]]
    client.responses.create(**{**HELLO, "input": given})
    asked = server.asked[-1]
    if response.data:
        assert canonical_messages(asked.request)[-1] == canonical_response(response, server.asked[-2].request)
        assert tuple(reasoning_of_message(asked.request.messages[-1], pytest.fail)) == response.thinking
    assert asked.request.origin.dropped == ()


FULL = LLMResponse(
    [
        ThinkingData("hm"),
        TextData("look"),
        ToolCallData("c1", "bash", '{"command": "ls"}'),
        ToolCallData("c2", "apply_patch", '{"input": "*** Start"}'),
        ToolCallData("c3", "mcp__x__y", "{}"),
        ToolCallData("c4", "apply_patch", "*** no JSON"),
    ],
    usage=Usage(10, 5, cached_tokens=4, cache_write_tokens=2, reasoning_tokens=3),
)


def test_stream_has_the_documented_order(server: WireServer) -> None:
    server.response, server.keepalives = FULL, 2
    asked = WIRE.read({**HELLO, "stream": True})
    written = b"".join(server.written(WIRE, asked))
    events = event_data(written)
    assert [line[7:] for line in written.decode().split("\n") if line.startswith("event: ")] == [
        event["type"] for event in events
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added, done = ["output_item.added"], ["output_item.done"]
    summary = ["part.added", "text.delta", "text.done", "part.done"]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call, custom = "function_call_arguments", "custom_tool_call_input"
    assert [event["type"].removeprefix("response.") for event in events] == [
        *["created", "in_progress", "in_progress", "in_progress"],
        *added,
        *(f"reasoning_summary_{name}" for name in summary),
        *done,
        *added,
        *text,
        *done,
        *(name for kind in (call, custom, call, custom) for name in (*added, f"{kind}.delta", f"{kind}.done", *done)),
        "completed",
    ]
    items = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert items == events[-1]["response"]["output"]
    assert [(item["type"], item["call_id"], item["name"], item.get("namespace")) for item in items[2:]] == [
        ("function_call", "c1", "bash", None),
        ("custom_tool_call", "c2", "apply_patch", None),
        ("function_call", "c3", "y", "mcp__x__"),
        ("custom_tool_call", "c4", "apply_patch", None),
    ]
    assert [item["input"] for item in items if "input" in item] == ["*** Start", "*** no JSON"]
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 2},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 15,
    }


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_finish_reasons_are_converted(finish: str, status: str, details: Any) -> None:
    asked = WIRE.read({**HELLO, "stream": True})
    *_, last = event_data(b"".join(WIRE.events(asked, LLMResponse.from_text("x", finish_reason=finish), 0)))
    assert last["type"] == f"response.{status}"
    assert (last["response"]["status"], last["response"]["incomplete_details"]) == (status, details)


def test_tools_become_functions_for_the_policy() -> None:
    more = [{"type": "additional_tools", "role": "developer", "tools": [{"type": "local_shell"}]}]
    given = [{"role": "user", "content": "hello"}, *more]
    asked = WIRE.read({**HELLO, "input": given, "tools": [*TOOLS, {"type": "web_search"}]})
    assert asked.request.tools is not None
    functions = {tool["function"]["name"]: tool["function"] for tool in asked.request.tools}
    assert list(functions) == ["bash", "apply_patch", "mcp__x__y", "local_shell"]
    assert "start: x" in functions["apply_patch"]["parameters"]["properties"]["input"]["description"]
    assert functions["mcp__x__y"]["description"] == "of x\n\ndoes y"
    assert asked.request.origin.dropped == ("tools[web_search]",)
    call = ToolCallData("c1", "local_shell", '{"command": ["ls", "-l"], "timeout_ms": 5}')
    (item,) = json.loads(WIRE.whole(asked, LLMResponse([call])))["output"]
    assert item["type"] == "local_shell_call"
    assert item["action"] == {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5}
    output = {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"}
    said, heard = WIRE.read({**HELLO, "input": [item, output]}).request.messages
    assert json.loads(said["tool_calls"][0]["function"]["arguments"])["command"] == ["ls", "-l"]
    assert (heard["tool_call_id"], heard["content"]) == ("c1", "a.txt")


def test_items_are_read_as_chat_messages() -> None:
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be quick"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be exact"}]},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "high"},
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "s",
        },
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** é"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call", "call_id": "c2", "name": "y", "namespace": "mcp__x__", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_image", "image_url": "data:image/png;base64,BB=="}],
        },
        {
            "type": "agent_message",
            "author": "/root",
            "recipient": "/root/helper",
            "content": [
                {"type": "input_text", "text": "Payload:\n"},
                {"type": "encrypted_content", "encrypted_content": "help"},
            ],
        },
        {"type": "message", "role": "developer", "content": "be slow"},
    ]

    def image(data: str, **more: Any) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **more}}

    def call(call_id: str, name: str, arguments: str) -> list[dict[str, Any]]:
        return [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}]

    request = WIRE.read({**HELLO, "input": given, "instructions": "be brief"}).request
    assert request.system_prompt == "be brief\n\nbe quick\n\nbe exact"
    assert request.messages == freeze(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, image("AA==", detail="high")]},
            {
                "role": "assistant",
                "content": "x",
                "reasoning_details": [{"type": "reasoning.text", "text": "hm", "signature": "s"}],
                "tool_calls": call("c1", "apply_patch", '{"input": "*** é"}'),
            },
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
            {"role": "assistant", "content": None, "tool_calls": call("c2", "mcp__x__y", "{}")},
            {"role": "tool", "tool_call_id": "c2", "content": [image("BB==")]},
            {"role": "user", "content": [{"type": "text", "text": text} for text in ("Payload:\n", "help")]},
            {"role": "developer", "content": "be slow"},
        ]
    )


def test_sampling_and_dropped_fields_are_named() -> None:
    body = {
        **HELLO,
        "instructions": "be brief",
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "max_output_tokens": 9,
        "reasoning": {"effort": "high"},
        "text": {"verbosity": "low", "format": {"type": "json_schema"}},
        "parallel_tool_calls": False,
        "store": True,
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
        "input": [{"role": "user", "content": "x"}, {"type": "web_search_call", "id": "ws_1"}],
    }
    request = WIRE.read(body).request
    assert set(request.origin.sampling) == {"max_output_tokens", "reasoning", "text", "parallel_tool_calls"}
    assert request.origin.dropped == (
        *("include", "input[web_search_call]", "metadata", "prompt_cache_key", "store", "text.format"),
    )
    assert request.system_prompt == "be brief"
    assert request.tool_choice == {"type": "function", "function": {"name": "apply_patch"}}
    assert (request.max_output_tokens, request.metadata) == (None, None)


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"input": [{"type": kind, **fields}]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input": None}, "`input`"),
        ({"previous_response_id": "resp_1"}, "`previous_response_id`"),
        ({"conversation": {"id": "c"}}, "`conversation`"),
        ({"background": True}, "`background`"),
        ({"tool_choice": "some"}, "`tool_choice`"),
        ({"tools": [{"type": "function"}]}, "`name`"),
        (item("item_reference", id="rs_1"), "`item_reference`"),
        (item("message", role="tool", content=""), "`role`"),
        (item("function_call", call_id="c", name="f"), "`arguments`"),
        (item("function_call_output", call_id="c", output=None), "`output`"),
        (item("message", role="user", content=[{"type": "input_image", "image_url": "http://x"}]), "data:"),
        (item("message", role="user", content=[{"type": "input_image", "file_id": "f"}]), "`image_url`"),
        (item("message", role="user", content=[{"type": "input_file", "file_url": "http://x"}]), "`file_data`"),
    ],
)
def test_unsupported_fields_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(WireFormatError, match=named):
        WIRE.read({**HELLO, **change})


def test_refused_and_failed_requests_are_client_errors(server: WireServer, client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="nothing is stored") as refused:
        client.responses.create(**HELLO, previous_response_id="resp_1")
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", "previous_response_id")
    server.fails_with = "the policy is gone"
    try:
        with pytest.raises(InternalServerError, match="the policy is gone"):
            client.responses.create(**HELLO)
    finally:
        server.fails_with = None
    assert server.keys[-1] == "key-1"


def test_request_tokens_are_estimated(client: OpenAI) -> None:
    assert 10 < client.responses.input_tokens.count(model="policy", input="a" * 60).input_tokens < 60
