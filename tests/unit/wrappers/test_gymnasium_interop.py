import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics, TimeLimit

from ares_exp.wrappers.sync_gym import GymWrapper
from tests.unit.wrappers.gym_environments import (
    ACTION,
    CountingEnvironment,
    make_bare_gym,
    make_counting_gym,
)


@pytest.fixture
def registered():
    spec = gymnasium.register("AresExpTest/Counting-v0", entry_point=make_counting_gym)
    yield "AresExpTest/Counting-v0"
    assert spec is None
    del gymnasium.registry["AresExpTest/Counting-v0"]


def test_gymnasium_finds_nothing_to_complain_about(registered):
    env = gymnasium.make(registered)
    check_env(env.unwrapped)
    env.close()


def test_of_one_that_gymnasium_did_not_make_it_says_only_that_it_cannot_make_another():
    with GymWrapper(CountingEnvironment(), render_mode="ansi") as env:
        check_env(env, skip_render_check=True)
        with pytest.warns(UserWarning, match="not having a spec") as caught:
            check_env(env)
    assert len(caught) == 1


def test_one_with_three_methods_and_no_seed_is_a_gymnasium_environment():
    gymnasium.register("AresExpTest/Bare-v0", entry_point=make_bare_gym)
    try:
        env = gymnasium.make("AresExpTest/Bare-v0")
        check_env(env.unwrapped)
        env.close()
    finally:
        del gymnasium.registry["AresExpTest/Bare-v0"]
    assert env.unwrapped.environment.closed == 1


def test_the_seed_of_one_that_takes_none_seeds_np_random():
    with make_bare_gym() as env:
        env.reset(seed=3)
        drawn = env.np_random.integers(1000)
        env.reset(seed=3)
        assert (env.np_random_seed, env.np_random.integers(1000)) == (3, drawn)
        with pytest.raises(TypeError, match=r"BareEnvironment\.reset\(\) does not take them, got \{'task': 1\}"):
            env.reset(options={"task": 1})


def test_one_with_three_methods_under_gymnasiums_wrappers():
    with TimeLimit(OrderEnforcing(make_bare_gym()), 2) as env:
        env.reset(seed=1)
        env.step(ACTION)
        assert env.step(ACTION)[2:4] == (False, True)
    envs = SyncVectorEnv([make_bare_gym] * 2)
    envs.reset(seed=7)
    for _ in range(3):
        _, rewards, terminations, _, _ = envs.step((ACTION, ACTION))
    assert (rewards.tolist(), terminations.tolist()) == ([1.0, 1.0], [True, True])
    envs.close()


def test_gymnasiums_own_wrappers():
    env = RecordEpisodeStatistics(OrderEnforcing(TimeLimit(GymWrapper(CountingEnvironment(length=3)), 10)))
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(ACTION)
    env.reset()
    env.step(ACTION)
    env.step(ACTION)
    *_, terminated, truncated, info = env.step(ACTION)
    env.close()
    assert (terminated, truncated) == (True, False)
    assert (info["episode"]["r"], info["episode"]["l"]) == (1.5, 3)
    assert info["time_step"].last()


def test_shared_memory_cannot_hold_the_spaces():
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv([make_counting_gym])
