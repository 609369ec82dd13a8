"""The wire format against its own documentation, against the official client's types, and against itself."""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ares_exp.errors import PolicyError
from ares_exp.llms.openai_chat import request_from_body, request_to_body, response_from_body, response_to_body
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.llms.wire import WireFormatError
from tests.examples import examples

TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "required": ["path"]}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
FULL = LLMRequest(
    messages=[
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    ],
    max_output_tokens=100,
    temperature=0.5,
    top_p=0.9,
    stream=True,
    tools=[TOOL],
    tool_choice={"type": "function", "function": {"name": "ls"}},
    metadata={"episode": "7"},
    service_tier="flex",
    stop_sequences=["END"],
    system_prompt="be brief",
)


def test_request_is_written_to_the_wire() -> None:
    body = request_to_body(FULL, model="m")
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "look"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        ],
        "max_completion_tokens": 100,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "ls"}},
        "metadata": {"episode": "7"},
        "service_tier": "flex",
        "stop": ["END"],
    }
    assert request_from_body(json.loads(json.dumps(body))) == FULL


def test_unset_fields_are_not_sent() -> None:
    assert set(request_to_body(LLMRequest([{"role": "user", "content": "x"}]), model="m")) == {"model", "messages"}


def test_body_is_an_independent_copy() -> None:
    body = request_to_body(FULL, model="m")
    body["messages"][1]["content"][0]["text"] = "changed"
    assert FULL.messages[0]["content"][0]["text"] == "look"


text = st.text(st.characters(codec="utf-8"), max_size=20)
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, width=32) | text
content = text | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": text}), max_size=3)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": content},
    optional={"name": text, "tool_call_id": text, "extra": st.dictionaries(text, scalars, max_size=2)},
)
requests = st.builds(
    LLMRequest,
    messages=st.lists(messages, max_size=4),
    max_output_tokens=st.none() | st.integers(1, 10**6),
    temperature=st.none() | st.floats(0, 2),
    top_p=st.none() | st.floats(0, 1),
    stream=st.booleans(),
    tools=st.none() | st.lists(st.just(TOOL), max_size=2),
    tool_choice=st.none() | st.sampled_from(["auto", "none", "required"]) | st.just({"type": "function"}),
    metadata=st.none() | st.dictionaries(text, text, max_size=2),
    service_tier=st.none() | text,
    stop_sequences=st.none() | st.lists(text, max_size=3),
    system_prompt=st.none() | text,
)


@examples(50)
@given(requests, st.sampled_from(["max_tokens", "max_completion_tokens"]))
def test_requests_round_trip(request: LLMRequest, field: Any) -> None:
    body = json.loads(json.dumps(request_to_body(request, model="m", max_tokens_field=field)))
    assert request_from_body(body) == request


pieces = st.builds(ToolCallData, id=text, name=text, arguments=text)
thoughts = st.builds(ThinkingData, text.filter(bool), st.none() | text, st.booleans())
responses = st.builds(
    LLMResponse,
    data=st.builds(
        lambda thinking, texts, calls: [*thinking, *map(TextData, texts), *calls],
        st.lists(thoughts, max_size=2),
        st.lists(text, max_size=1),
        st.lists(pieces, max_size=2),
    ),
    usage=st.builds(Usage, *[st.integers(0, 10**6)] * 5),
    model=st.none() | text.filter(bool),
)


@examples(50)
@given(responses)
def test_responses_round_trip(response: LLMResponse) -> None:
    again = response_from_body(json.loads(json.dumps(response_to_body(response))))
    calls = any(isinstance(piece, ToolCallData) for piece in response.data)
    assert again == replace(response, finish_reason="tool_calls" if calls else "stop")


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_other_finish_reasons_round_trip(reason: str) -> None:
    response = LLMResponse([ToolCallData("c", "f", "{}")], finish_reason=reason)
    assert response_from_body(response_to_body(response)) == response


def test_fields_of_engines_for_training_are_read() -> None:
    choice = {"token_ids": [3, 4], "logprobs": {"content": [{"token": "", "logprob": -0.5, "top_logprobs": []}]}}
    own = {
        "latency_sec": 1.5,
        "sampling": {"temperature": 0.5},
        "policy_version": "v7",
        "policy_version_from": "announced",
        "activations": {"layer": {"file": "activations/a.npy", "rows": 2}},
    }
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "cost": 0.25}
    body = respond(**choice) | {"prompt_token_ids": [1, 2], "usage": usage, **own}
    assert response_from_body(body) == LLMResponse(
        [TextData("hi")],
        cost=0.25,
        usage=Usage(2, 2),
        prompt_token_ids=[1, 2],
        completion_token_ids=[3, 4],
        logprobs=[-0.5],
        **own,
    )


def respond(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, **choice}]}


HM = {"type": "reasoning.text", "text": "hm", "signature": "s", "index": 0}


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"reasoning_content": "hm"}, [ThinkingData("hm")]),
        ({"reasoning": "hm"}, [ThinkingData("hm")]),
        ({"reasoning": "hm", "reasoning_content": "hm"}, [ThinkingData("hm")]),
        ({"reasoning": "short", "reasoning_content": "hm"}, [ThinkingData("hm"), ThinkingData("short")]),
        ({"reasoning": "", "reasoning_content": None, "reasoning_details": []}, []),
        ({"reasoning": "hm", "reasoning_details": [HM]}, [ThinkingData("hm", "s")]),
        ({"reasoning_details": [{"type": "reasoning.summary", "summary": "so"}]}, [ThinkingData("so")]),
        (
            {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.encrypted", "data": "Zm8="}]},
            [ThinkingData("hm"), ThinkingData("Zm8=", redacted=True)],
        ),
    ],
)
def test_reasoning_is_read_from_every_field(fields: dict[str, Any], thinking: list[ThinkingData]) -> None:
    response = response_from_body(respond(message={"content": "hi", **fields}))
    assert list(response.data) == [*thinking, TextData("hi")]
    assert (response.text, list(response.thinking)) == ("hi", thinking)


def test_reasoning_is_read_from_content_parts() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "hi"}]
    assert list(response_from_body(respond(message={"content": parts})).data) == [ThinkingData("hm"), TextData("hi")]
    parts[0] = {"type": "thinking", "thinking": 7}
    with pytest.warns(UserWarning, match="reasoning that are not text"):
        assert response_from_body(respond(message={"content": parts}), strict=False).text == "hi"


def test_response_with_only_reasoning_has_no_text() -> None:
    response = response_from_body(respond(message={"content": None, "reasoning": "hm"}, finish_reason="length"))
    assert (response.text, response.thinking) == ("", (ThinkingData("hm"),))


@pytest.mark.parametrize(
    ("counts", "usage"),
    [
        ({"completion_tokens_details": {"reasoning_tokens": 5}, "total_tokens": 17}, Usage(10, 7, reasoning_tokens=5)),
        ({"completion_tokens_details": {"reasoning_tokens": 5}, "total_tokens": 22}, Usage(10, 12, reasoning_tokens=5)),
        ({"prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 2}}, Usage(10, 7, 4, 2)),
        ({"completion_tokens_details": None, "prompt_tokens_details": "x"}, Usage(10, 7)),
        ({"completion_tokens_details": {"reasoning_tokens": -5}}, Usage(10, 7)),
        ({"completion_tokens_details": {"reasoning_tokens": "5"}}, Usage(10, 7)),
        ({"prompt_tokens_details": {"cached_tokens": 10**30, "cache_write_tokens": True}}, Usage(10, 7)),
    ],
)
def test_usage_details_are_read(counts: dict[str, Any], usage: Usage) -> None:
    body = respond() | {"usage": {"prompt_tokens": 10, "completion_tokens": 7, **counts}}
    assert response_from_body(body).usage == usage


def test_minimal_response_is_read() -> None:
    assert response_from_body(respond()) == LLMResponse.from_text("hi")
    assert list(response_from_body(respond(message={})).data) == []


def test_refusal_is_text_and_round_trips() -> None:
    response = response_from_body(respond(message={"content": None, "refusal": "I won't"}, finish_reason="stop"))
    assert (response.text, response.finish_reason) == ("I won't", "refusal")
    again = response_to_body(response)["choices"][0]
    assert again["message"] == {"role": "assistant", "content": None, "refusal": "I won't"}
    assert again["finish_reason"] == "stop"
    assert response_from_body({"choices": [again]}) == response


def test_content_parts_are_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert list(response_from_body(respond(message={"content": parts})).data) == [TextData("a"), TextData("b")]
    with pytest.raises(WireFormatError, match="image_url"):
        response_from_body(respond(message={"content": [{"type": "image_url"}]}), strict=False)


@pytest.mark.parametrize(
    ("request_", "named"),
    [(replace(FULL, top_k=3), "`top_k`"), (replace(FULL, metadata={"n": 1}), r"`metadata\.n` of type int")],
)
def test_dropped_fields_of_written_request_are_named(request_: LLMRequest, named: str) -> None:
    with pytest.raises(WireFormatError, match=named):
        request_to_body(request_, model="m")
    with pytest.warns(UserWarning, match=named):
        body = request_to_body(request_, model="m", strict=False)
    assert "top_k" not in body
    assert body["metadata"] in ({}, {"episode": "7"})


def test_several_texts_of_written_response_are_joined() -> None:
    mixed = LLMResponse([ToolCallData("c", "f", "{}"), TextData("a"), ThinkingData("hm"), TextData("b")])
    message = response_to_body(mixed)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == ("ab", "hm", 1)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (respond() | {"prompt_logprobs": [1]}, "`prompt_logprobs` of the response"),
        (respond(stop_reason="END"), "`stop_reason` of the response's choice"),
        (respond(message={"content": "hi", "reasoning_content": {"a": 1}}), "`reasoning_content` that is not text"),
        (respond(message={"content": "hi", "reasoning_details": "hm"}), "`reasoning_details` that are not a list"),
        (respond(message={"content": "hi", "reasoning_details": [{"type": ["x"]}]}), "`reasoning_details` of type"),
        (respond(message={"content": "hi", "reasoning_details": [[]]}), "`reasoning_details` of type None"),
        (respond(message={"content": "hi", "audio": {"id": "a"}}), "`audio` of the response's message"),
        ({"choices": respond()["choices"] * 2}, "all but the first of 2 choices"),
        (respond(logprobs={"content": [{"logprob": -1, "top_logprobs": [{"token": "x"}]}]}), "`top_logprobs`"),
    ],
)
def test_dropped_fields_of_read_response_are_named(body: dict[str, Any], named: str) -> None:
    with pytest.raises(WireFormatError, match=named):
        response_from_body(body)
    with pytest.warns(UserWarning, match=named):
        assert response_from_body(body, strict=False).text == "hi"
    said: list[str] = []
    assert response_from_body(body, strict=False, report=said.append).text == "hi"
    assert len(said) == 1


@pytest.mark.parametrize("key", ["seed", "logit_bias", "stream_options", "parallel_tool_calls", "n"])
def test_dropped_fields_of_read_request_are_named(key: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], key: 2}
    with pytest.raises(WireFormatError, match=f"`{key}` of the request"):
        request_from_body(body)
    with pytest.warns(UserWarning, match=key):
        assert request_from_body(body, strict=False).messages[0]["content"] == "x"
    assert request_from_body(body | {key: None}).messages[0]["content"] == "x"


def test_alternative_spellings_are_read() -> None:
    body = {"messages": [], "stop": "END", "max_tokens": 5, "max_completion_tokens": 5, "top_k": 2, "n": 1}
    request = request_from_body(body)
    assert (request.stop_sequences, request.max_output_tokens, request.top_k) == (("END",), 5, 2)


@pytest.mark.parametrize(
    "first",
    [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "system", "content": "be brief", "name": "boss"},
    ],
)
def test_unusual_system_text_is_unchanged(first: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [first, {"role": "user", "content": "x"}]}
    request = request_from_body(body)
    assert request.system_prompt is None
    assert request_to_body(request, model="m") == body


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "`the request`"),
        ({}, "`messages`"),
        ({"messages": "hi"}, "`messages` to be list, got str: 'hi'"),
        ({"messages": ["hi"]}, r"messages\[\]"),
        ({"messages": [{"content": "hi"}]}, "`role`"),
        ({"messages": [], "temperature": "hot"}, "`temperature` to be int or float, got str"),
        ({"messages": [], "temperature": True}, "`temperature`"),
        ({"messages": [], "stream": 1}, "`stream`"),
        ({"messages": [], "stop": [1]}, r"`stop\[\]`"),
        ({"messages": [], "tools": {}}, "`tools`"),
        ({"messages": [], "max_tokens": 1, "max_completion_tokens": 2}, "only one of max_completion_tokens=2"),
    ],
)
def test_malformed_requests_are_rejected(body: Any, said: str) -> None:
    with pytest.raises(WireFormatError, match=said):
        request_from_body(body, strict=False)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("hi", "`the response`"),
        ({"choices": []}, "at least one choice"),
        (respond(logprobs={"content": [{"token": "x"}]}), "`logprob`"),
        (respond(logprobs=5), "`logprobs`"),
        (respond(token_ids=["1"]), r"`token_ids\[\]`"),
        (respond(finish_reason=0), "`finish_reason`"),
        (respond(message={"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}), "`arguments`"),
        (respond() | {"usage": {"completion_tokens": True}}, "`completion_tokens`"),
        (respond() | {"model": 5}, "`model`"),
    ],
)
def test_malformed_responses_are_rejected(body: Any, said: str) -> None:
    with pytest.raises(WireFormatError, match=said) as raised:
        response_from_body(body, strict=False)
    assert isinstance(raised.value, PolicyError)
    assert isinstance(raised.value, ValueError)


def test_error_shows_a_bounded_part_of_input() -> None:
    with pytest.raises(WireFormatError, match="1000002 characters") as raised:
        response_from_body("x" * 1_000_000)
    assert len(str(raised.value)) < 500


json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=10
)


@examples(50)
@given(st.data())
def test_damaged_response_is_read_or_rejected(data: st.DataObject) -> None:
    body = json.loads(json.dumps(response_to_body(LLMResponse([TextData("hi"), ToolCallData("c", "f", "{}")]))))
    body["choices"][0]["logprobs"] = {"content": [{"token": "", "logprob": -1}]}
    target: Any = body
    while True:
        key = data.draw(st.sampled_from(sorted(target)) if isinstance(target, dict) else st.just(0))
        if not isinstance(target[key], dict | list) or not target[key] or data.draw(st.booleans()):
            break
        target = target[key]
    target[key] = data.draw(json_values)
    with suppress(WireFormatError):
        assert isinstance(response_from_body(body, strict=False, report=lambda _: None), LLMResponse)
