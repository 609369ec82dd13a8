import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics, TimeLimit

from ares_exp.wrappers.sync_gym import GymWrapper
from tests.unit.wrappers.gym_environments import (
    ACTION,
    CountingEnvironment,
    make_bare_gym,
    make_counting_gym,
    make_foreign_gym,
)


@pytest.mark.parametrize("make", [make_counting_gym, make_bare_gym, make_foreign_gym])
def test_gymnasium_finds_nothing_to_complain_about(make):
    gymnasium.register("AresExpTest/Checked-v0", entry_point=make)
    try:
        env = gymnasium.make("AresExpTest/Checked-v0")
        check_env(env.unwrapped)
        env.close()
    finally:
        del gymnasium.registry["AresExpTest/Checked-v0"]


def test_of_one_that_gymnasium_did_not_make_it_says_only_that_it_cannot_make_another():
    with GymWrapper(CountingEnvironment(), render_mode="ansi") as env:
        check_env(env, skip_render_check=True)
        with pytest.warns(UserWarning, match="not having a spec") as caught:
            check_env(env)
    assert len(caught) == 1


def test_the_seed_of_one_that_takes_none_seeds_np_random():
    with make_bare_gym() as env:
        env.reset(seed=3)
        drawn = env.np_random.integers(1000)
        env.reset(seed=3)
        assert (env.np_random_seed, env.np_random.integers(1000)) == (3, drawn)


@pytest.mark.parametrize(("limit", "ended", "total"), [(10, (True, False), 1.5), (2, (False, True), 0.5)])
def test_gymnasiums_own_wrappers_go_around_it(limit, ended, total):
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
