"""Vector environments: what each autoreset mode does, in one process and in workers of every start method."""

import functools
import os
import signal

import cloudpickle
import numpy
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.wrappers.async_gym import NO_REQUEST, EpisodeInfo
from ares_exp.wrappers.sync_gym import GymWrapper
from tests.leaks import wait_until
from tests.unit.wrappers.gym_environments import ACTION, CountingEnvironment, make_counting_gym_of

ACTIONS = (ACTION, ACTION)
fork = pytest.param("fork", marks=pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"))
KINDS = ["sync", fork, "spawn", "forkserver"]
FACTORIES = [functools.partial(make_counting_gym_of, 2), functools.partial(make_counting_gym_of, 4)]


def vector(kind, factories, mode):
    if kind == "sync":
        return SyncVectorEnv(factories, autoreset_mode=mode)
    return AsyncVectorEnv(factories, shared_memory=False, context=kind, autoreset_mode=mode)


@pytest.fixture(params=["sync", fork, *(pytest.param(one, marks=pytest.mark.nightly) for one in KINDS[2:])])
def start(request):
    """Makes vector environments of one kind; whatever happens they are closed, and their processes have ended."""
    made = []

    def make(mode, factories=FACTORIES):
        made.append(vector(request.param, factories, mode))
        return made[-1]

    yield make
    for envs in made:
        envs.close()
        assert not any(process.is_alive() for process in getattr(envs, "processes", ()))


def texts(observations):
    return [request.messages[0]["content"] if request.messages else "" for request in observations]


def test_next_step_resets_on_the_step_after_the_last(start):
    envs = start(AutoresetMode.NEXT_STEP)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    envs.reset(options={"task": 7})
    envs.step(ACTIONS)
    observations, rewards, terminations, truncations, infos = envs.step(ACTIONS)
    assert (observations[0], texts(observations)[1]) == (NO_REQUEST, "task 7, count 2, after one more")
    assert (rewards.tolist(), terminations.tolist(), truncations.any()) == ([1.0, 0.25], [True, False], False)
    assert infos["time_step"][0].last()
    observations, rewards, terminations, _, infos = envs.step(ACTIONS)
    assert (rewards.tolist(), terminations.tolist()) == ([0.0, 0.25], [False, False])
    assert infos["time_step"][0].first()
    assert infos["time_step"][0].observation == observations[0]
    assert observations in envs.observation_space


def test_same_step_resets_at_once_and_keeps_the_end_in_the_infos(start):
    envs = start(AutoresetMode.SAME_STEP)
    envs.reset(options={"task": 7})
    envs.step(ACTIONS)
    observations, rewards, terminations, _, infos = envs.step(ACTIONS)
    assert (rewards.tolist(), terminations.tolist()) == ([1.0, 0.25], [True, False])
    assert infos["final_obs"][0] == NO_REQUEST
    assert infos["final_info"]["time_step"][0].last()
    assert infos["time_step"][0].first()
    assert texts(observations)[0].startswith("task ")
    assert texts(observations)[1] == "task 7, count 2, after one more"


def test_disabled_leaves_the_reset_to_a_mask(start):
    envs = start(AutoresetMode.DISABLED)
    envs.reset(options={"task": 7})
    envs.step(ACTIONS)
    *_, terminations, _, _ = envs.step(ACTIONS)
    assert terminations.tolist() == [True, False]
    observations, infos = envs.reset(options={"reset_mask": numpy.array([True, False]), "task": 9})
    assert texts(observations) == ["task 9", "task 7, count 2, after one more"]
    assert infos["time_step"][0].first()
    observations, *_ = envs.step(ACTIONS)
    assert texts(observations) == ["task 9, count 1, after one more", "task 7, count 3, after one more"]


def test_a_seed_gives_each_its_own_and_the_same_again(start):
    envs = start(AutoresetMode.NEXT_STEP)
    first, _ = envs.reset(seed=5)
    again, _ = envs.reset(seed=5)
    assert first == again
    assert first[0] != first[1]


def test_infos_are_stacked_by_key(start):
    envs = start(AutoresetMode.NEXT_STEP)
    _, infos = envs.reset()
    assert (infos["step"].tolist(), infos["outcome"].tolist()) == ([0, 0], [None, None])
    actions = tuple(LLMResponse.from_text("a", usage=Usage(10, 5), cost=cost) for cost in (0.25, 0.5))
    envs.step(actions)
    *_, infos = envs.step(actions)
    assert (infos["step"].tolist(), infos["outcome"].tolist()) == ([2, 2], ["completed", None])
    assert infos["usage"]["prompt_tokens"].tolist() == [20, 20]
    assert infos["usage"]["cost"].tolist() == [0.5, 1.0]
    assert all(infos[f"_{key}"].all() for key in EpisodeInfo.__annotations__)


def test_a_closure_reaches_the_workers_by_cloudpickle(start):
    length = 1

    def factory():
        from ares_exp.wrappers.sync_gym import GymWrapper
        from tests.unit.wrappers.gym_environments import CountingEnvironment

        return GymWrapper(CountingEnvironment(length))

    envs = start(AutoresetMode.NEXT_STEP, [factory, cloudpickle.loads(cloudpickle.dumps(factory))])
    envs.reset()
    assert envs.step(ACTIONS)[2].all()


class _BreakingEnvironment(CountingEnvironment):
    async def step(self, action):
        raise LookupError("the box is gone")


def make_breaking_gym():
    return GymWrapper(_BreakingEnvironment())


@pytest.mark.filterwarnings("ignore::UserWarning")  # how Gymnasium tells of the workers that it shuts down
@pytest.mark.parametrize("kind", [*KINDS[:3], pytest.param("forkserver", marks=pytest.mark.nightly)])
def test_an_error_in_a_worker_keeps_its_class_and_words(kind):
    envs = vector(kind, [make_breaking_gym] * 2, AutoresetMode.NEXT_STEP)
    envs.reset()
    with pytest.raises(LookupError, match="the box is gone"):
        envs.step(ACTIONS)
    envs.close(terminate=True)  # the workers are gone: there is nobody to be asked to close
    assert not any(process.is_alive() for process in getattr(envs, "processes", ()))


@pytest.mark.parametrize("kind", [fork, *(pytest.param(one, marks=pytest.mark.nightly) for one in KINDS[2:])])
def test_a_worker_that_is_killed_does_not_hold_the_others(kind):
    envs = vector(kind, FACTORIES, AutoresetMode.NEXT_STEP)
    envs.reset()
    assert all(process.is_alive() for process in envs.processes)
    os.kill(envs.processes[0].pid, signal.SIGKILL)
    assert wait_until(lambda: not envs.processes[0].is_alive())
    envs.close(terminate=True)
    assert not any(process.is_alive() for process in envs.processes)
