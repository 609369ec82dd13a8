"""Request bodies: malformed ones, and those that agents sent (`tests.soak.recorded_bodies`)."""

import copy
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ares_exp.agents.interception.agent_endpoint import WIRES
from ares_exp.agents.interception.served_wire import Asked, Wire
from ares_exp.errors import WireFormatError
from ares_exp.llms.canonical import canonical
from ares_exp.llms.chat_messages import reasoning_of_message
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData
from ares_exp.llms.wire import MAX_DEPTH, parse_body
from tests.examples import examples

PNG = "data:image/png;base64,AA=="
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
INPUT_TEXT = {"type": "input_text", "text": "t"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WHOLE: dict[str, dict[str, Any]] = {
    "chat_completions": {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 1,
        "n": 1,
        "stop": ["x"],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "metadata": {"a": "b"},
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": PNG}}],
            },
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "reasoning_details": [{"type": "reasoning.text", "text": "r"}]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
    },
    "messages": {
        "model": "m",
        "max_tokens": 1,
        "stream": True,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}, {"type": "x_1", "name": "x"}],
        "tool_choice": {"type": "tool", "name": "f"},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "system", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "is_error": True,
                        "content": [{"type": "text", "text": "t"}],
                    },
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                    {"type": "document", "title": "t", "source": {"type": "text", "data": "d"}},
                ],
            },
        ],
    },
    "responses": {
        "model": "m",
        "stream": True,
        "instructions": "s",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "tool_choice": {"type": "function", "name": "f"},
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
            {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "f"}]},
            {"type": "local_shell"},
            {"type": "web_search"},
        ],
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "t"}, {"type": "input_image", "image_url": PNG}],
            },
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "encrypted_content": "e"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [INPUT_TEXT]},
            {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "i"},
            {"type": "local_shell_call", "call_id": "e", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "g"}]},
            {"type": "compaction", "encrypted_content": "x"},
        ],
    },
    "generate_content": {
        "model": "m",
        "stream": True,
        "alt": "sse",
        "systemInstruction": {"parts": [{"text": "s"}]},
        "tools": [
            {
                "functionDeclarations": [
                    {
                        "name": "f",
                        "description": "d",
                        "parameters": {
                            "type": "OBJECT",
                            "properties": {"type": {"type": "STRING", "nullable": True, "minLength": "1"}},
                            "anyOf": [{"type": "OBJECT"}],
                        },
                    },
                    {"name": "g", "parametersJsonSchema": {"type": "object"}},
                ]
            },
            {"googleSearch": {}},
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "maxOutputTokens": 1,
            "topK": 64.0,
            "candidateCount": 1,
            "stopSequences": ["x"],
            "thinkingConfig": {"includeThoughts": True},
            "responseMimeType": "application/json",
            "responseSchema": {"type": "OBJECT"},
        },
        "contents": [
            {"role": "user", "parts": [{"text": "t"}, {"inlineData": {"mimeType": "image/png", "data": "AA=="}}]},
            {
                "role": "model",
                "parts": [
                    {"text": "r", "thought": True},
                    {"text": "t", "thoughtSignature": "WyJhcmVzLWV4cCIsIHsidGhpbmtpbmciOiAiciJ9XQ=="},
                    {"functionCall": {"id": "c", "name": "f", "args": {"a": 1}}, "thoughtSignature": "skip"},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {
                        "functionResponse": {
                            "name": "f",
                            "response": {"output": "x"},
                            "parts": [{"inlineData": {"mimeType": "image/png", "data": "AA=="}}],
                        }
                    },
                    {"executableCode": {"code": "x"}},
                ],
            },
        ],
    },
}
RESPONSE = LLMResponse(
    [ThinkingData("r"), TextData("t"), *(ToolCallData("c", name, "{}") for name in ("f", "p", "n__f", "local_shell"))]
)
WORDS = [
    *("role", "type", "text", "content", "function", "custom", "tool", "thinking", "namespace", "base64", "", "id"),
    *("file", "parts", "functionResponse", "thought_signature"),
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(one for key in keys for one in places(value[key], (*path, key)))]


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


def check(wire: Wire, body: Any) -> None:
    """Reads a body as it comes over a connection, and answers it in all ways."""
    try:
        asked = wire.read(parse_body(json.dumps(body).encode()))
    except WireFormatError as refused:
        told = json.loads(wire.error(400, str(refused)))["error"]
        assert "Expected" in told["message"]
        return
    assert canonical(asked.request).fingerprint
    assert asked.request.origin is not None
    json.loads(wire.whole(asked, RESPONSE))
    assert b"".join([wire.opening(asked), wire.keepalive(asked, 1), *wire.events(asked, RESPONSE, 1)])
    if wire.count_path is not None:
        assert wire.count(body)


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
def test_complete_body_is_read(wire: Wire) -> None:
    asked = wire.read(WHOLE[wire.name])
    assert asked.streamed
    assert asked.request.tools


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
@examples(150)
@given(data=st.data())
def test_changed_body_is_read_or_refused(wire: Wire, data: st.DataObject) -> None:
    body = WHOLE[wire.name]
    for _ in range(data.draw(st.integers(1, 2))):
        body = changed(body, data.draw(st.sampled_from(places(body))), data.draw(values))
    check(wire, body)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "a JSON body"),
        (b"{", "a JSON body"),
        (b"\xff", "a JSON body"),
        (b'{"a": NaN}', "not a valid JSON number"),
        (b'{"a": 1e999}', "numbers that fit into a 64-bit float"),
        (b'{"a": ' + b"1" * 5000 + b"}", "a JSON body"),
        (b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2), "levels"),
        (b"[" * 100_000, "a JSON body"),
    ],
)
def test_invalid_bytes_are_refused(raw: bytes, named: str) -> None:
    with pytest.raises(WireFormatError, match=named):
        parse_body(raw)


def test_lone_surrogates_are_replaced() -> None:
    body = parse_body(json.dumps({"a\ud83d": ["x\ud83d", "\U0001f600", "\udc00y"]}).encode())
    assert body == {"a\ufffd": ["x\ufffd", "\U0001f600", "\ufffdy"]}


BODIES = Path(__file__).parents[3] / "fixtures" / "agent_bodies"
CLAUDE = ("cache_control", "is_error", "metadata")
CODEX = ("client_metadata", "prompt_cache_key")
AGENTS = {
    "claude_code": ("messages", CLAUDE),
    "claude_code_betas": ("messages", (*CLAUDE, "context_management", "defer_loading")),
    "codex": ("responses", (*CODEX, "tools[tool_search]")),
    "codex_code_mode": ("responses", CODEX),
    "gemini_cli": ("generate_content", ("thoughtSignature",)),
    "opencode": ("chat_completions", ()),
    "qwen_code": ("chat_completions", ()),
}
"""By the name of the file: the wire, and what cannot be carried, all of it."""

VARYING = re.compile(r"Chunk ID: \w+|Wall time:? [\d.]+ seconds|PGID: \d+")


@cache
def runs(agent: str) -> list[list[Asked]]:
    recorded = json.loads((BODIES / f"{agent}.json").read_text())
    wire: Wire = next(one for one in WIRES if one.name == AGENTS[agent][0])
    return [[wire.read({**recorded["common"], **body}) for body in run] for run in recorded["runs"]]


def unvarying(value: Any) -> Any:
    if isinstance(value, str):
        return VARYING.sub("", value)
    if isinstance(value, dict):
        return {key: unvarying(item) for key, item in value.items()}
    return [unvarying(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("agent", AGENTS)
def test_only_declared_fields_are_dropped(agent: str) -> None:
    for run in runs(agent):
        lost = {name for asked in run if asked.request.origin for name in asked.request.origin.dropped}
        assert lost == set(AGENTS[agent][1])


@pytest.mark.parametrize("agent", AGENTS)
def test_each_request_continues_its_predecessor(agent: str) -> None:
    for run in runs(agent):
        assert len(run) == 3
        for earlier, later in pairwise(canonical(asked.request) for asked in run):
            assert later.continues(earlier)
            assert not earlier.continues(later)
            assert later.fingerprint != earlier.fingerprint


@pytest.mark.parametrize(
    ("agent", "normalise"),
    [
        *[("claude_code", None), ("codex", unvarying), ("gemini_cli", unvarying)],
        *[("opencode", None), ("qwen_code", None)],
    ],
)
def test_two_runs_send_the_same_requests(agent: str, normalise: Any) -> None:
    one, other = ([canonical(asked.request, normalise).fingerprint for asked in run] for run in runs(agent))
    assert one == other


def test_codex_requests_differ_in_times() -> None:
    one, other = ([canonical(asked.request).fingerprint for asked in run] for run in runs("codex"))
    assert (one[0], one[1] == other[1]) == (other[0], False)


@pytest.mark.parametrize("agent", sorted(AGENTS.keys() - {"codex_code_mode"}))
def test_reasoning_round_trips(agent: str) -> None:
    (*_, last), *_ = runs(agent)
    said = [message for message in last.request.messages if message["role"] == "assistant"]
    is_text = AGENTS[agent][0] == "chat_completions"
    assert [reasoning_of_message(message, pytest.fail) for message in said] == [
        [ThinkingData("I think é")],
        [ThinkingData("again") if is_text else ThinkingData("c2VjcmV0", redacted=True)],
    ]


@pytest.mark.parametrize("agent", ["claude_code", "claude_code_betas", "codex", "gemini_cli", "opencode"])
def test_images_of_tools_are_included(agent: str) -> None:
    (*_, last), *_ = runs(agent)
    *_, part = last.request.messages[-1]["content"]
    assert part["image_url"]["url"].startswith("data:image/png;base64,")


def test_calls_of_custom_tools_round_trip() -> None:
    (*_, last), *_ = runs("codex")
    (patch,) = [call for message in last.request.messages for call in message.get("tool_calls", ())][1:2]
    assert json.loads(patch["function"]["arguments"])["input"].startswith("*** Begin Patch")
    assert last.forms["apply_patch"].kind == "custom"
    (*_, last), *_ = runs("codex_code_mode")
    assert (last.forms["functions__exec"].kind, last.forms["clock__sleep"].kind) == ("custom", "function")
