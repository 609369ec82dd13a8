import json
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from hypothesis import given

from ares_exp.agents.interception.agent_endpoint import Endpoint
from ares_exp.agents.interception.line import Line
from ares_exp.agents.interception.served_generate_content import GenerateContentWire
from ares_exp.errors import WireFormatError
from ares_exp.llms.canonical import canonical_messages
from ares_exp.llms.chat_messages import reasoning_of_message
from ares_exp.llms.request import freeze
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from tests.canonical_response import canonical_response
from tests.drawn_responses import mixed_responses, responses
from tests.examples import examples
from tests.served_line import Port, Recorder, served
from tests.wire_server import event_data

WIRE = GenerateContentWire()
MODELS = "/v1beta/models/org/m:8b"
HELLO: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}
PNG = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.fixture
def llm() -> Recorder:
    return Recorder()


@pytest.fixture
async def port(llm: Recorder) -> AsyncIterator[Port]:
    async with served(Line(llm, keepalive_sec=0.02), endpoint=Endpoint(whole_starts_sec=0.05)) as port:
        yield port


def kept(chunks: list[Any], *, drops_thoughts: bool) -> list[dict[str, Any]]:
    """The parts that a client sends again. gemini-cli drops thoughts and joins texts."""
    parts: list[dict[str, Any]] = []
    for part in [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]:
        if drops_thoughts and part.get("thought"):
            continue
        if drops_thoughts and "text" in part and "thoughtSignature" not in part and parts and "text" in parts[-1]:
            parts[-1]["text"] += part["text"]
        else:
            parts.append({**part})
    return parts


@pytest.mark.parametrize("drops_thoughts", [True, False])
@examples(60)
@given(response=responses | mixed_responses)
def test_repeated_response_is_the_same_message(response: LLMResponse, drops_thoughts: bool) -> None:
    asked = WIRE.read({**HELLO, "model": "policy", "stream": True})
    streamed, whole = event_data(b"".join(WIRE.events(asked, response, 0))), json.loads(WIRE.whole(asked, response))
    assert "".join(told(streamed, "text")) == "".join(told([whole], "text"))
    assert told(streamed, "functionCall") == told([whole], "functionCall")
    parts, end = whole["candidates"][0]["content"]["parts"], streamed[-1]
    assert (end["usageMetadata"], end["candidates"][0]["finishReason"]) == (
        whole["usageMetadata"],
        whole["candidates"][0]["finishReason"],
    )
    for chunks in (streamed, [whole]):
        said = {"role": "model", "parts": kept(chunks, drops_thoughts=drops_thoughts)}
        request = WIRE.read({"contents": [*HELLO["contents"], said]}).request
        assert canonical_messages(request)[-1] == canonical_response(response, asked.request)
        if not (drops_thoughts and parts and "thought" in parts[-1]):  # no part follows, which could have the signature
            assert tuple(reasoning_of_message(request.messages[-1], pytest.fail)) == response.thinking
        assert request.origin is not None
        assert request.origin.dropped == ()


def told(chunks: list[Any], kind: str) -> list[Any]:
    return [part[kind] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"] if kind in part]


FULL = LLMResponse(
    [ThinkingData("hm"), TextData("look"), ToolCallData("c1", "bash", '{"a": 1}'), ToolCallData("", "bash", "{broken")],
    usage=Usage(10, 5, cached_tokens=4, reasoning_tokens=3),
)


def test_stream_has_one_part_per_event() -> None:
    asked = WIRE.read({**HELLO, "model": "policy", "stream": True})
    events = event_data(b"".join(WIRE.events(asked, FULL, 0)))
    assert [chunk["candidates"][0]["content"]["parts"] for chunk in events] == [
        [{"text": "hm", "thought": True}],
        [{"text": "look", "thoughtSignature": b64encode(b'["ares-exp", {"thinking": "hm"}]').decode()}],
        [{"functionCall": {"id": "c1", "name": "bash", "args": {"a": 1}}}],
        [{"functionCall": {"id": "call-1", "name": "bash", "args": {"invalid_arguments": "{broken"}}}],
    ]
    assert {chunk["modelVersion"] for chunk in events} == {"policy"}
    assert ["finishReason" in chunk["candidates"][0] for chunk in events] == [False, False, False, True]
    assert events[-1]["usageMetadata"] == {
        "promptTokenCount": 10,
        "cachedContentTokenCount": 4,
        "candidatesTokenCount": 2,
        "thoughtsTokenCount": 3,
        "totalTokenCount": 15,
    }


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "STOP"), ("length", "MAX_TOKENS"), ("content_filter", "SAFETY"), (None, "STOP")]
)
def test_finish_reasons_are_converted(finish: str | None, reason: str) -> None:
    whole = json.loads(WIRE.whole(WIRE.read(HELLO), LLMResponse.from_text("x", finish_reason=finish)))
    assert whole["candidates"][0]["finishReason"] == reason


def test_sampling_and_dropped_fields_are_named() -> None:
    config = {
        "maxOutputTokens": 9,
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 64.0,
        "thinkingConfig": {"thinkingBudget": 1},
    }
    body = {
        **HELLO,
        "system_instruction": {"parts": [{"text": "one"}, {"text": "two"}]},
        "generation_config": {**config, "stop_sequences": ["END"], "responseJsonSchema": {"type": "object"}},
        "safetySettings": [{"category": "x"}],
        "tools": [
            {"google_search": {}},
            {"function_declarations": [{"name": "f", "parameters": {"type": "OBJECT", "property_ordering": ["a"]}}]},
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f", "g"]}},
    }
    request = WIRE.read(body).request
    assert request.origin is not None
    assert request.origin.sampling == freeze(config)
    assert request.origin.dropped == (
        *("allowedFunctionNames", "responseJsonSchema", "safetySettings", "tools[googleSearch]"),
    )
    assert (request.system_prompt, request.tool_choice, request.stop_sequences) == ("one\n\ntwo", "required", ("END",))
    assert request.tools == freeze([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {"é": 1}, **more}}


def result(name: str, response: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **more}}


def test_contents_are_read_as_chat_messages() -> None:
    contents = [
        {"parts": [{"text": "a"}, {"inline_data": {"mime_type": "image/png", "data": "AA=="}}]},
        {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "x"}, call("f"), call("g"), call("g")]},
        {
            "role": "user",
            "parts": [
                {"text": "next"},
                result("g", {"output": "1"}, parts=[PNG]),
                result("f", {"error": "no"}),
                result("g", {"output": "2"}, id="c9"),
            ],
        },
        {"role": "user", "parts": [{"inlineData": {"mimeType": "text/plain", "data": "_-==", "displayName": "n"}}]},
    ]
    arguments = '{"é": 1}'
    calls = [
        {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name in enumerate("fgg", 1)
    ]
    assert WIRE.read({"contents": contents}).request.messages == freeze(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]},
            {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call-2", "content": [{"type": "text", "text": "1"}, IMAGE]},
            {"role": "tool", "tool_call_id": "call-1", "content": '{"error": "no"}'},
            {"role": "tool", "tool_call_id": "call-3", "content": "2"},
            {"role": "user", "content": "next"},
            {
                "role": "user",
                "content": [{"type": "file", "file": {"filename": "n", "file_data": "data:text/plain;base64,/+=="}}],
            },
        ]
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"contents": 1}, "`contents`"),
        ({"contents": [{"role": "tool", "parts": []}]}, "`role`"),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "https://x"}}]}]}, "`fileData`"),
        ({"contents": [{"parts": [{"functionResponse": {}}]}]}, "`name`"),
        ({"generationConfig": {"candidateCount": 2}}, "`candidateCount`"),
        ({"cachedContent": "cachedContents/x"}, "`cachedContent`"),
        ({"systemInstruction": {"parts": [PNG]}}, "`systemInstruction`"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "`name`"),
    ],
)
def test_unsupported_fields_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(WireFormatError, match=named):
        WIRE.read({**HELLO, **change})


def test_forged_signature_is_ignored() -> None:
    for forged in ("skip", "é", "====", b64encode(b'["ares-exp", {"content": "x"}]').decode(), "WzFd"):
        said = {"role": "model", "parts": [{"text": "x", "thoughtSignature": forged}]}
        request = WIRE.read({"contents": [said]}).request
        assert (request.messages[0], request.origin and request.origin.dropped) == (
            {"role": "assistant", "content": "x"},
            ("thoughtSignature",),
        )


async def test_model_and_format_are_in_the_url(port: Port, llm: Recorder) -> None:
    status, body = await port.post(HELLO, path=f"{MODELS}:generateContent")
    assert (status, told([json.loads(body)], "text")[0][:8]) == (200, "answer 1")
    _, body = await port.post(HELLO, path=f"{MODELS}:streamGenerateContent?alt=sse")
    assert told(event_data(body), "text")[0].startswith("answer 2")
    _, body = await port.post(HELLO, path=f"{MODELS}:streamGenerateContent")
    assert told(json.loads(body), "text")[0].startswith("answer 3")
    origins = [call.origin for call in llm.calls]
    assert {(one.wire, one.model) for one in origins if one} == {("generate_content", "org/m:8b")}
    assert [call.stream for call in llm.calls] == [False, True, True]


async def test_key_in_the_query_is_accepted_and_not_recorded(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    path = f"{MODELS}:generateContent?key="
    status, _ = await port.post(HELLO, path=f"{path}{port.line.key}", Authorization="")
    assert status == 200
    status, body = await port.post(HELLO, path=f"{path}AIza-secret", Authorization="")
    error = json.loads(body)["error"]
    assert (status, error["code"], error["status"]) == (401, 401, "UNAUTHENTICATED")
    assert f"POST {MODELS}:generateContent: 401" in str(port.line.report.last_refusal)
    assert "AIza-secret" not in f"{port.line.report}{caplog.text}{body!r}"


async def test_refused_request_has_an_error_of_google(port: Port) -> None:
    status, body = await port.post({"contents": [{"role": "x"}]}, path=f"{MODELS}:streamGenerateContent?alt=sse")
    error = json.loads(body)["error"]
    assert (status, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
    assert "`role`" in error["message"]


async def test_tokens_are_counted_without_a_call(port: Port, llm: Recorder) -> None:
    _, body = await port.post({"contents": [{"parts": [{"text": "a b " * 1000}]}]}, path=f"{MODELS}:countTokens")
    assert (1000 < json.loads(body)["totalTokens"] < 1100, llm.calls) == (True, [])
