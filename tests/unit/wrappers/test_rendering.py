import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from ares_exp.wrappers.async_gym import wrap_as_gym
from ares_exp.wrappers.sync_gym import GymWrapper
from tests.unit.wrappers.gym_environments import ACTION, CountingEnvironment, RaisingEnvironment

AFTER_STEP = "[assistant]\none more\n\n[user]\ntask 7, count 1, after one more"
AT_THE_END = "[assistant]\none more\n\n[end] terminated, reward 1"


def make_rendering_gym(render_mode="ansi"):
    return GymWrapper(CountingEnvironment(length=2), render_mode=render_mode)


def test_the_last_exchange():
    with make_rendering_gym() as gym:
        assert gym.render() == ""
        gym.reset(options={"task": 7})
        assert gym.render() == "[user]\ntask 7"
        gym.step(ACTION)
        assert gym.render() == gym.render() == AFTER_STEP
        gym.step(ACTION)
        assert gym.render() == AT_THE_END
        gym.reset(options={"task": 8})
        assert gym.render() == "[user]\ntask 8"
    assert gym.render() == "[user]\ntask 8"


async def test_the_same_when_awaited():
    async with wrap_as_gym(CountingEnvironment(length=2), async_mode=True, render_mode="ansi") as gym:
        assert await gym.render() == ""
        await gym.reset(options={"task": 7})
        await gym.step(ACTION)
        assert await gym.render() == AFTER_STEP


def test_without_a_mode_there_is_nothing_to_see():
    with wrap_as_gym(CountingEnvironment()) as gym:
        gym.reset()
        assert (gym.render_mode, gym.render()) == (None, None)


def test_a_step_that_raises_leaves_the_exchange_before_it():
    with wrap_as_gym(RaisingEnvironment(LookupError("gone")), render_mode="ansi") as gym:
        gym.reset()
        with pytest.raises(LookupError):
            gym.step(ACTION)
        assert gym.render() == "[user]\nfirst"


@pytest.mark.parametrize("async_mode", [False, True])
def test_another_mode_is_refused(async_mode):
    with pytest.raises(ValueError, match="render_mode to be 'ansi' or None, got 'rgb_array'"):
        wrap_as_gym(CountingEnvironment(), async_mode=async_mode, render_mode="rgb_array")


@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_in_vector_environments(vector):
    more = {"shared_memory": False, "context": "spawn"} if vector is AsyncVectorEnv else {}
    envs = vector([make_rendering_gym] * 2, **more)
    try:
        assert envs.render_mode == "ansi"
        envs.reset(options={"task": 7})
        envs.step((ACTION, ACTION))
        assert envs.render() == (AFTER_STEP, AFTER_STEP)
    finally:
        envs.close()
