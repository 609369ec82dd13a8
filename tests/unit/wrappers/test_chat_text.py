from dataclasses import dataclass

import pytest

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData
from ares_exp.wrappers.async_gym import NO_REQUEST
from ares_exp.wrappers.chat_text import Exchange, conversation_text, news_text, response_text

CALL = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
REQUEST = LLMRequest(
    system_prompt="be brief",
    messages=[
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "a file", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "text", "text": "go on"}, {"type": "image_url", "image_url": {}}]},
    ],
)


def test_a_conversation_has_every_message_under_its_role():
    assert conversation_text(REQUEST) == (
        "[system]\nbe brief\n\n[user]\ndo it\n\n"
        '[assistant]\n<tool call> bash({"command": "ls"})\n\n'
        "[tool]\na file\n\n[user]\ngo on\n<image_url>"
    )


def test_news_is_what_came_after_the_last_response():
    assert news_text(REQUEST) == "a file\n\ngo on\n<image_url>"
    assert news_text(LLMRequest(messages=REQUEST.messages[:1])) == "do it"


def test_an_ended_episode_has_nothing_to_say():
    assert conversation_text(NO_REQUEST) == news_text(NO_REQUEST) == ""
    assert conversation_text(None) == ""


@dataclass
class Prompt:
    messages: list


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (Prompt([{"role": "user", "content": "hi"}]), "[user]\nhi"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "[user]\nhi"),
        (Prompt(["bare"]), "[message]\nbare"),
        (Prompt([{"role": "user", "content": {"a": 1}}]), '[user]\n{"a": 1}'),
        (Prompt([{"role": "user", "content": ["bare", 7], "tool_calls": [3]}]), "[user]\n<part>\n<part>"),
        (42, "[observation]\n42"),
    ],
)
def test_requests_of_other_classes(observation, text):
    assert conversation_text(observation) == text


def test_a_response():
    response = LLMResponse([TextData("I look."), ToolCallData("1", "bash", "{}")])
    assert response_text(response) == "I look.\n<tool call> bash({})"
    assert response_text(7) == "7"
    response = LLMResponse([ThinkingData("hm"), ThinkingData("Zm8=", redacted=True), TextData("I look.")])
    assert response_text(response) == "<thinking> hm\n<thinking> (encrypted)\nI look."


@pytest.mark.parametrize(("terminated", "how"), [(True, "terminated"), (False, "truncated")])
def test_an_exchange_at_the_end(terminated, how):
    exchange = Exchange(LLMResponse.from_text("done"), NO_REQUEST, 0.5, terminated, not terminated)
    assert str(exchange) == f"[assistant]\ndone\n\n[end] {how}, reward 0.5"


def test_what_a_container_says_cannot_steer_the_terminal():
    request = LLMRequest(messages=[{"role": "user", "content": "a\tb\n\x1b[2J\x07\x9bgrün"}])
    assert str(Exchange(None, request)) == "[user]\na\tb\n\ufffd[2J\ufffd\ufffdgrün"
