import json
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from ares_exp.llms.request import LLMRequest, Message
from ares_exp.llms.response import LLMResponse
from ares_exp.trajectories.files.step_encoding import StepDecoder, StepEncoder
from ares_exp.trajectories.records import (
    EpisodeTrajectory,
    StepRecord,
    deserialize_llm_request,
    deserialize_llm_response,
    serialize_llm_request,
    serialize_llm_response,
)
from tests.examples import examples
from tests.unit.trajectories.strategies import rewritten_trajectories, trajectories


def encoded(records: list[StepRecord]) -> list[str]:
    encoder = StepEncoder()
    return [json.dumps(encoder.encode(record)[1]) for record in records]


def decoded(lines: list[str]) -> list[StepRecord]:
    decoder = StepDecoder()
    return [decoder.decode(json.loads(line)) for line in lines]


def asking(index: int, messages: list[Any], reply: LLMResponse | None = None, **more: Any) -> StepRecord:
    observation = serialize_llm_request(LLMRequest(messages, **more))
    action = None if reply is None else serialize_llm_response(reply)
    return StepRecord(index, "MID", observation, action, 0.0, 1.0, float(index))


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


@examples(20)
@given(rewritten_trajectories())
def test_requests_and_responses_round_trip(trajectory: EpisodeTrajectory) -> None:
    for step in trajectory.steps:
        if step.observation is not None:
            assert serialize_llm_request(deserialize_llm_request(step.observation)) == step.observation
        if step.action is not None:
            response = deserialize_llm_response(json.loads(json.dumps(step.action)))
            assert response == deserialize_llm_response(step.action)
            assert serialize_llm_response(response) == step.action


@examples(15)
@given(trajectories())
def test_decoded_records_share_messages(trajectory: EpisodeTrajectory) -> None:
    encoder = StepEncoder()
    seen: dict[str, Any] = {}
    for record in trajectory.steps:
        shared = encoder.encode(record)[0]
        assert shared == record
        messages = (shared.observation or {}).get("messages")
        for message in messages if isinstance(messages, tuple) else ():
            if type(message) is Message and all(type(value) is str for value in message.values()):
                assert seen.setdefault(json.dumps(message), message) is message


def appending(length: int) -> list[StepRecord]:
    messages = [said(f"{i}".ljust(200, ".")) for i in range(2 * length)]
    return [asking(i, [dict(m) for m in messages[: 2 * i + 1]]) for i in range(length)]


def two_at_once(length: int) -> list[StepRecord]:
    return [asking(i, [said(f"{i % 2} {k}".ljust(200, ".")) for k in range(i // 2 + 1)]) for i in range(length)]


def sliding(length: int) -> list[StepRecord]:
    return [asking(i, [said(f"{k}".ljust(200, ".")) for k in range(i, i + 10)]) for i in range(length)]


def with_tools(length: int) -> list[StepRecord]:
    tools = [{"type": "function", "function": {"name": f"tool{i}", "description": "x" * 100}} for i in range(20)]
    return [asking(i, [said("same")], tools=tools, system_prompt="s" * 1000) for i in range(length)]


def with_token_ids(length: int) -> list[StepRecord]:
    ids: list[int] = list(range(100))
    records = []
    for i in range(length):
        new = list(range(10 * i, 10 * i + 10))
        reply = LLMResponse.from_text("x", prompt_token_ids=list(ids), completion_token_ids=new)
        records.append(asking(i, [said("same")], reply))
        ids += [*new, 7, 7]
    return records


@pytest.mark.parametrize("make", [appending, two_at_once, sliding, with_tools, with_token_ids])
def test_size_grows_linearly(make: Callable[[int], list[StepRecord]]) -> None:
    short, long = encoded(make(25)), encoded(make(100))
    assert sum(map(len, long)) < 4.4 * sum(map(len, short))
    assert decoded(long) == make(100)


def test_reply_is_stored_once_with_its_message() -> None:
    text = "a reply that is long enough " * 20
    after = [said("q"), said(text, "assistant")]
    lines = encoded([asking(0, [said("q")]), asking(1, after, LLMResponse.from_text(text))])
    assert "".join(lines).count(text) == 1
    assert decoded(lines)[1].action == serialize_llm_response(LLMResponse.from_text(text))


def test_equal_values_of_other_types_round_trip() -> None:
    ids = [*range(2, 20)]
    actions = [{"data": [{"content": {}}], "prompt_token_ids": [*given, *ids]} for given in ([1], [1.0], [True])]
    settings = [{"a": 1, "b": 2}, {"b": 1, "a": 2}, {"a": 1, "b": True}]
    records = [
        StepRecord(i, "MID", {"messages": [], **more}, action, 0.0, 1.0, 0.0)
        for i, (more, action) in enumerate(zip(settings, actions, strict=True))
    ]
    back = decoded(encoded(records))
    assert [dict(step.observation or {}) for step in back] == [{"messages": (), **more} for more in settings]
    assert repr([step.action for step in back]) == repr([step.action for step in records])


@pytest.mark.parametrize("second", [1, 1.0, True])
@pytest.mark.parametrize("first", [1, 1.0, True])
def test_equal_messages_of_other_types_are_separate(first: Any, second: Any) -> None:
    back = decoded(encoded([asking(0, [{"role": "user", "n": first}]), asking(1, [{"role": "user", "n": second}])]))
    assert [type(step.observation["messages"][0]["n"]) for step in back if step.observation] == [
        type(first),
        type(second),
    ]


def test_values_resembling_the_encoding_round_trip() -> None:
    odd: list[Any] = [
        {"conversation": 0},
        {"verbatim": {"conversation": 1}},
        {"messages": "none", "conversation": 3},
        {"messages": [1, "x", None]},
        {"data": [{"content_of": 0}]},
        {"data": [{"content": "x" * 50}, {"content_of": 0}], "prompt_token_ids": [1]},
        {"data": [], "prompt_token_ids": {"step": 0, "keep": 0, "add": []}},
        {"prompt_token_ids": {"step": 0, "keep": 9, "add": []}},
        {"data": "text", "verbatim": 1},
        {"data": [["x"], "y", 1, None], "prompt_token_ids": "abc"},
        None,
    ]
    records = [asking(0, [said("x" * 50)])]
    records += [StepRecord(i, "MID", value, value, 0.0, 1.0, 0.0) for i, value in enumerate(odd, 1)]
    assert decoded(encoded(records)) == records


@pytest.mark.parametrize("step", [
    {"observation": {"conversation": 5}},
    {"observation": {"conversation": -2}},
    {"observation": {"conversation": True}},
    {"observation": {"conversation": "0"}},
    {"observation": {"conversation": 0, "settings": 3}},
    {"observation": {"conversation": 0, "settings": None}},
    {"action": {"data": [{"content_of": 9}]}},
    {"action": {"data": [{"content_of": -1}]}},
    {"action": {"data": [], "prompt_token_ids": {"step": 0, "keep": 1, "add": []}}},
    {"action": {"data": [], "prompt_token_ids": {}}},
    {"adds": {"nodes": [[7, 0]]}},
    {"adds": {"nodes": [[1, 0]]}},
    {"adds": {"nodes": [[0, 7]]}},
    {"adds": {"nodes": [[0]]}},
    {"adds": {"nodes": [0]}},
    {"adds": {"nodes": [["a", "b"]]}},
    {"adds": {"messages": ["text"]}},
    {"adds": {"settings": [3]}, "observation": {"conversation": 0, "settings": 0}},
    {"adds": []},
    {"adds": "x"},
    {"commands": [{"command": "ls"}]},
    {"commands": [1]},
    {"commands": 1},
    {"step_type": "END"},
    {"timestamp": "now"},
], ids=str)  # fmt: skip
def test_hostile_steps_are_refused(step: dict[str, Any]) -> None:
    decoder = StepDecoder()
    decoder.decode(json.loads(encoded([asking(0, [said("q")])])[0]))
    good = {"step_index": 1, "step_type": "MID", "observation": None, "action": None}
    good |= {"reward": 0.0, "discount": 1.0, "timestamp": 1.0}
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        decoder.decode({**good, **step})


def test_decoding_memory_is_bounded() -> None:
    decoder = StepDecoder()
    nodes = [[i - 1, 0] for i in range(100_000)]
    step = {"step_index": 0, "step_type": "FIRST", "observation": {"conversation": 99_999}, "action": None}
    step |= {"reward": None, "discount": None, "timestamp": 0.0, "adds": {"messages": [said("x")], "nodes": nodes}}
    decoder.decode(step)
    del step["adds"]
    with pytest.raises(ValueError, match="all requests together"):
        deque((decoder.decode(step) for _ in range(2000)), maxlen=0)
