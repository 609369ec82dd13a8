import warnings

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from ares_exp.llms.request import LLMRequest
from ares_exp.wrappers.spaces import LLMRequestSpace, TextAction, TextObservation
from ares_exp.wrappers.sync_gym import GymWrapper
from tests.unit.wrappers.gym_environments import ACTION, CountingEnvironment, make_text_gym


def test_an_episode_in_plain_strings():
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


def test_news_leaves_the_headings_out():
    env = TextObservation(GymWrapper(CountingEnvironment()), content="news")
    assert env.reset(options={"task": 7})[0] == "task 7"
    env.close()


def test_each_goes_without_the_other():
    only_observation = TextObservation(GymWrapper(CountingEnvironment()))
    only_action = TextAction(GymWrapper(CountingEnvironment()))
    with only_observation, only_action:
        only_observation.reset()
        assert isinstance(only_observation.step(ACTION)[0], str)
        only_action.reset()
        assert isinstance(only_action.step("text")[0], LLMRequest)
        assert only_action.observation_space == LLMRequestSpace()


def test_what_they_refuse():
    with GymWrapper(CountingEnvironment()) as gym:
        with pytest.raises(ValueError, match="'conversation' or 'news', got 'last'"):
            TextObservation(gym, content="last")
        env = TextAction(gym)
        env.reset()
        with pytest.raises(TypeError, match="Expected a string for TextAction, got LLMResponse"):
            env.step(ACTION)


def test_gymnasium_checks_them_and_makes_them_again_from_the_spec():
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


def test_in_vector_environments():
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
