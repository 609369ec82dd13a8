"""Text wrappers, their spaces and chat texts, and other wrappers of Gymnasium."""

import json
import pickle
import warnings
from dataclasses import dataclass

import gymnasium
import pytest
from gymnasium.spaces import Tuple
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics, TimeLimit

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.wrappers.async_gym import NO_REQUEST
from ares_exp.wrappers.chat_text import Exchange, conversation_text, news_text, response_text
from ares_exp.wrappers.spaces import LLMRequestSpace, LLMResponseSpace, TextAction, TextObservation, TextSpace
from ares_exp.wrappers.sync_gym import GymWrapper
from tests.unit.wrappers.gym_environments import (
    ACTION,
    CountingEnvironment,
    make_bare_gym,
    make_counting_gym,
    make_foreign_gym,
    make_text_gym,
)


def test_episode_runs_in_plain_strings():
    with make_text_gym(length=2) as env:
        assert env.reset(options={"task": 7})[0] == "[user]\ntask 7"
        observation, *_ = env.step("schöne\nGrüße")
        assert observation == "[user]\ntask 7, count 1, after schöne\nGrüße"
        observation, reward, terminated, _, info = env.step("")
        assert (observation, reward, terminated) == ("", 1.0, True)
        assert info["time_step"].last()


def test_every_text_is_in_the_spaces():
    with make_text_gym() as env:
        for text in (env.reset()[0], env.step("x" * 1_000_000)[0], "", "\x00\n\ud800", env.action_space.sample()):
            assert text in env.observation_space
            assert text in env.action_space


def test_news_omits_the_headings():
    env = TextObservation(GymWrapper(CountingEnvironment()), content="news")
    assert env.reset(options={"task": 7})[0] == "task 7"
    env.close()


def test_text_wrappers_are_independent():
    only_observation = TextObservation(GymWrapper(CountingEnvironment()))
    only_action = TextAction(GymWrapper(CountingEnvironment()))
    with only_observation, only_action:
        only_observation.reset()
        assert isinstance(only_observation.step(ACTION)[0], str)
        only_action.reset()
        assert isinstance(only_action.step("text")[0], LLMRequest)
        assert only_action.observation_space == LLMRequestSpace()


def test_invalid_arguments_are_refused():
    with GymWrapper(CountingEnvironment()) as gym:
        with pytest.raises(ValueError, match="'conversation' or 'news', got 'last'"):
            TextObservation(gym, content="last")
        env = TextAction(gym)
        env.reset()
        with pytest.raises(TypeError, match="Expected a string for TextAction, got LLMResponse"):
            env.step(ACTION)


def test_gymnasium_checks_and_recreates_the_text_wrappers():
    gymnasium.register("AresExpTest/Text-v0", entry_point=make_counting_gym_of_length_5)
    try:
        env = TextAction(TextObservation(gymnasium.make("AresExpTest/Text-v0"), content="news"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_env(env)
        assert ["different from the unwrapped version" in str(warning.message) for warning in caught] == [True]
        again = gymnasium.make(env.spec)
        assert again.reset(options={"task": 7})[0] == "task 7"
        assert again.step("text")[0].startswith("task 7, count 1, after text")
        env.close()
        again.close()
    finally:
        del gymnasium.registry["AresExpTest/Text-v0"]


def make_counting_gym_of_length_5(render_mode=None):
    return GymWrapper(CountingEnvironment(length=5), render_mode=render_mode)


def test_vector_environments_exchange_texts():
    for envs in (
        SyncVectorEnv([make_text_gym] * 2),
        AsyncVectorEnv([make_text_gym] * 2, shared_memory=False, context="spawn"),
    ):
        try:
            first, _ = envs.reset(seed=[3, 3])
            assert first[0] == first[1]
            assert first[0].startswith("[user]\ntask ")
            observations, *_ = envs.step(("a", "b"))
            assert [text[-7:] for text in observations] == ["after a", "after b"]
            assert observations in envs.observation_space
        finally:
            envs.close()


@pytest.mark.parametrize("make", [make_counting_gym, make_bare_gym, make_foreign_gym])
def test_gymnasium_checks_pass(make):
    gymnasium.register("AresExpTest/Checked-v0", entry_point=make)
    try:
        env = gymnasium.make("AresExpTest/Checked-v0")
        check_env(env.unwrapped)
        env.close()
    finally:
        del gymnasium.registry["AresExpTest/Checked-v0"]


def test_seed_without_support_seeds_np_random():
    with make_bare_gym() as env:
        env.reset(seed=3)
        drawn = env.np_random.integers(1000)
        env.reset(seed=3)
        assert (env.np_random_seed, env.np_random.integers(1000)) == (3, drawn)


@pytest.mark.parametrize(("limit", "ended", "total"), [(10, (True, False), 1.5), (2, (False, True), 0.5)])
def test_gymnasium_wrappers_can_be_added(limit, ended, total):
    env = RecordEpisodeStatistics(OrderEnforcing(TimeLimit(GymWrapper(CountingEnvironment(length=3)), limit)))
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(ACTION)
    env.reset()
    for _ in range(min(limit, 3)):
        *_, terminated, truncated, info = env.step(ACTION)
    env.close()
    assert (terminated, truncated) == ended
    assert (info["episode"]["r"], info["episode"]["l"]) == (total, min(limit, 3))
    assert info["time_step"].last() is ended[0]


def test_shared_memory_cannot_hold_the_spaces():
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv([make_counting_gym])


SPACES = [LLMRequestSpace, LLMResponseSpace, TextSpace]
FULL_REQUEST = LLMRequest(
    messages=[
        {"role": "user", "content": "grüß\n dich"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
    ],
    max_output_tokens=5,
    temperature=0.5,
    tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
    tool_choice={"type": "function"},
    metadata={"a": [1, {"b": None}]},
    stop_sequences=["END"],
    system_prompt="be brief",
    top_k=3,
)
FULL_RESPONSE = LLMResponse(
    data=[ThinkingData("hm", "seal"), TextData("text"), ToolCallData("1", "f", '{"x": 1}')],
    cost=0.25,
    usage=Usage(10, 3, reasoning_tokens=2),
    completion_token_ids=[1, 2, 3],
    logprobs=[-0.5, -0.25, -1.0],
    finish_reason="tool_calls",
    model="m",
    latency_sec=0.1,
    policy_version="3",
    activations={"layer": {"file": "activations/a.npy", "rows": 2}},
)


@pytest.mark.parametrize("space_class", SPACES)
def test_samples_are_members_and_follow_the_seed(space_class):
    space, again = space_class(seed=7), space_class()
    again.seed(7)
    samples = [space.sample() for _ in range(20)]
    assert all(sample in space for sample in samples)
    assert samples == [again.sample() for _ in range(20)]
    assert len({repr(sample) for sample in samples}) == 20


@pytest.mark.parametrize("space_class", SPACES)
@pytest.mark.parametrize("argument", ["mask", "probability"])
def test_sampling_rejects_a_mask(space_class, argument):
    with pytest.raises(ValueError, match="supports no mask"):
        space_class().sample(**{argument: (1, None)})


def test_membership_depends_on_the_type():
    assert FULL_REQUEST in LLMRequestSpace()
    assert FULL_RESPONSE in LLMResponseSpace()
    assert LLMResponse(data=()) in LLMResponseSpace()
    for stranger in ("text", None, {"messages": []}, FULL_RESPONSE):
        assert stranger not in LLMRequestSpace()
    for stranger in (b"bytes", None, 7, ["text"]):
        assert stranger not in TextSpace()
    for stranger in ("text", None, FULL_REQUEST, LLMResponse(data=["bare text"])):
        assert stranger not in LLMResponseSpace()


@pytest.mark.parametrize(
    ("space", "record"),
    [(LLMRequestSpace(), FULL_REQUEST), (LLMResponseSpace(), FULL_RESPONSE), (TextSpace(), "grüß\n dich \ud800")],
)
def test_records_round_trip_through_json(space, record):
    batch = [record, space.sample()]
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(batch)))) == batch


def test_requests_of_other_classes_become_ours():
    space, prompt = LLMRequestSpace(), Prompt([{"role": "user", "content": "hi"}])
    [back] = space.from_jsonable(json.loads(json.dumps(space.to_jsonable([prompt]))))
    assert back == LLMRequest(messages=[{"role": "user", "content": "hi"}])


def test_spaces_of_a_kind_are_equal():
    assert LLMRequestSpace(seed=1) == LLMRequestSpace()
    assert LLMRequestSpace() != LLMResponseSpace()
    for space_class in SPACES:
        assert pickle.loads(pickle.dumps(space_class(seed=1))) == space_class()


@pytest.mark.parametrize("space_class", SPACES)
def test_spaces_are_not_arrays(space_class):
    space = space_class()
    assert (space.shape, space.dtype, space.is_np_flattenable) == (None, None, False)
    batched = batch_space(space, 2)
    assert isinstance(batched, Tuple)
    assert batched.sample() in batched


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


def test_conversation_shows_every_message_with_its_role():
    assert conversation_text(REQUEST) == (
        "[system]\nbe brief\n\n[user]\ndo it\n\n"
        '[assistant]\n<tool call> bash({"command": "ls"})\n\n'
        "[tool]\na file\n\n[user]\ngo on\n<image_url>"
    )


def test_news_shows_messages_after_the_last_response():
    assert news_text(REQUEST) == "a file\n\ngo on\n<image_url>"
    assert news_text(LLMRequest(messages=REQUEST.messages[:1])) == "do it"


def test_ended_episode_has_no_text():
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
def test_requests_of_other_classes_are_shown(observation, text):
    assert conversation_text(observation) == text


def test_response_is_shown():
    response = LLMResponse([TextData("I look."), ToolCallData("1", "bash", "{}")])
    assert response_text(response) == "I look.\n<tool call> bash({})"
    assert response_text(7) == "7"
    response = LLMResponse([ThinkingData("hm"), ThinkingData("Zm8=", redacted=True), TextData("I look.")])
    assert response_text(response) == "<thinking> hm\n<thinking> (encrypted)\nI look."


def test_final_exchange_shows_truncation_and_reward():
    exchange = Exchange(LLMResponse.from_text("done"), NO_REQUEST, 0.5, False, True)
    assert str(exchange) == "[assistant]\ndone\n\n[end] truncated, reward 0.5"


def test_control_characters_are_replaced():
    request = LLMRequest(messages=[{"role": "user", "content": "a\tb\n\x1b[2J\x07\x9bgrün"}])
    assert str(Exchange(None, request)) == "[user]\na\tb\n\ufffd[2J\ufffd\ufffdgrün"
