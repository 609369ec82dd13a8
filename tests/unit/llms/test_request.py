import copy
import json
import pickle

import pytest

from ares_exp.llms.request import LLMRequest, Message


def test_later_message_edits_do_not_change_the_request() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    request = LLMRequest(messages, tools=[{"name": "t"}])
    messages[0]["role"] = "assistant"
    messages[0]["content"][0]["text"] = "bye"  # type: ignore[index]
    messages.append({"role": "user", "content": "more"})
    assert len(request.messages) == 1
    assert request.messages[0] == {"role": "user", "content": ({"type": "text", "text": "hi"},)}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__("role", "x"),
        lambda m: m.pop("role"),
        lambda m: m.update(role="x"),
        lambda m: m.clear(),
        lambda m: m.setdefault("x", 1),
        lambda m: m.__delitem__("role"),
        lambda m: m.__ior__({"role": "x"}),
    ],
)
def test_message_is_immutable(change: object) -> None:
    message = LLMRequest([{"role": "user", "content": "hi"}]).messages[0]
    with pytest.raises(TypeError, match="are immutable"):
        change(message)  # type: ignore[operator]
    assert message == {"role": "user", "content": "hi"}


def test_frozen_messages_are_shared_between_requests() -> None:
    message = Message(role="user", content="hi")
    assert LLMRequest([message]).messages[0] is message


def test_requests_pickle_compare_and_serialise() -> None:
    request = LLMRequest([{"role": "user", "content": "hi"}], temperature=0.5)
    assert pickle.loads(pickle.dumps(request)) == request
    assert json.loads(json.dumps(request.messages)) == [{"role": "user", "content": "hi"}]


def test_deepcopy_returns_the_request_itself() -> None:
    request = LLMRequest([{"role": "user", "content": ["hi"]}])
    assert copy.deepcopy(request) is request
    assert copy.deepcopy(request.messages) is request.messages
    assert copy.deepcopy(request.messages[0]) is request.messages[0]


def test_values_outside_json_are_refused() -> None:
    with pytest.raises(TypeError, match="JSON-like"):
        LLMRequest([{"role": "user", "content": object()}])
