"""The asynchronous Gymnasium wrapper, vector environments, and rendering."""

import functools

import numpy
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from ares_exp.environment import EnvironmentWrapper, EpisodeReport, restart, termination, transition, truncation
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.wrappers.async_gym import NO_REQUEST, AsyncGymWrapper, EpisodeInfo, to_gym, wrap_as_gym
from ares_exp.wrappers.spaces import LLMRequestSpace, LLMResponseSpace
from ares_exp.wrappers.sync_gym import GymWrapper
from tests.unit.wrappers import gym_environments

REQUEST = LLMRequest(messages=[{"role": "user", "content": "?"}])


@pytest.mark.parametrize(
    ("time_step", "expected"),
    [
        (restart(REQUEST), (REQUEST, 0.0, False, False)),
        (transition(REQUEST, 0.5), (REQUEST, 0.5, False, False)),
        (termination(1.0), (NO_REQUEST, 1.0, True, False)),
        (truncation(0.75), (NO_REQUEST, 0.75, False, True)),
        (truncation(None), (NO_REQUEST, 0.0, False, True)),
        (gym_environments.ForeignTimeStep("LAST", 1, 0, REQUEST), (REQUEST, 1.0, True, False)),
        (gym_environments.ForeignTimeStep("LAST", 1, 0.9, None), (NO_REQUEST, 1.0, False, True)),
    ],
)
def test_time_step_is_converted(time_step, expected):
    values = to_gym(time_step)
    assert values == expected
    assert [type(value) for value in values[1:]] == [float, bool, bool]
    assert values[0] in LLMRequestSpace()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (gym_environments.ForeignTimeStep(2, 0.0, 0.0, None), "step_type FIRST, MID or LAST, got 2"),
        (truncation(1.0)._replace(discount=None), "to have a discount"),
    ],
)
def test_broken_time_step_is_refused(broken, said):
    with pytest.raises(ValueError, match=said):
        to_gym(broken)


class ReportingEnvironment(gym_environments.CountingEnvironment):
    """Has a task's name and, when it has ended, a verdict."""

    def report(self):
        ended = self.count == self.length
        return EpisodeReport(
            task_name="count", rewards={"tests": 1, "style": 0.5} if ended else {}, truncated_by="tokens"
        )


@pytest.mark.parametrize(
    ("truncate", "end"),
    [
        (False, {"outcome": "completed", "limit": None, "rewards": {"tests": 1.0, "style": 0.5}}),
        (True, {"outcome": "truncated", "limit": "tokens", "rewards": {"tests": 1.0, "style": 0.5}}),
    ],
)
async def test_info_has_the_same_keys_at_every_step(truncate, end):
    paid = LLMResponse.from_text("a", usage=Usage(10, 5), cost=0.25)
    async with AsyncGymWrapper(ReportingEnvironment(2, truncate=truncate)) as gym:
        for _ in range(2):  # the second episode counts anew
            _, first = await gym.reset()
            *_, middle = await gym.step(paid)
            *_, last = await gym.step(None)
            assert [info.pop("time_step").step_type for info in (first, middle, last)] == ["FIRST", "MID", "LAST"]
            running = {"task": "count", "outcome": None, "limit": None, "rewards": {}}
            used = {"prompt_tokens": 10, "generated_tokens": 5, "cost": 0.25}
            nothing = {"prompt_tokens": 0, "generated_tokens": 0, "cost": 0.0}
            assert first == {**running, "step": 0, "usage": nothing}
            assert middle == {**running, "step": 1, "usage": used}
            assert last == {"task": "count", "step": 2, "usage": used, **end}
            assert {*EpisodeInfo.__annotations__} == {*last, "time_step"}


async def test_info_of_plain_environment_has_defaults():
    async with AsyncGymWrapper(gym_environments.BareEnvironment(length=1)) as gym:
        _, info = await gym.reset()
        assert (info["task"], info["outcome"], info["rewards"]) == (None, None, {})
        *_, info = await gym.step("of another package")
        assert (info["step"], info["outcome"], info["usage"]["prompt_tokens"]) == (1, "completed", 0)


async def test_seed_repeats_the_tasks():
    gym = AsyncGymWrapper(gym_environments.PassingOnEnvironment(gym_environments.CountingEnvironment()))

    async def two_tasks(seed):
        return (await gym.reset(seed=seed))[0], (await gym.reset())[0]

    assert await two_tasks(0) == await two_tasks(0)
    assert await two_tasks(0) != await two_tasks(1)


async def test_environment_without_options_rejects_them():
    with pytest.raises(TypeError, match=r"PlainEnvironment\.reset\(\) does not accept options, but got"):
        await AsyncGymWrapper(gym_environments.PlainEnvironment()).reset(seed=1, options={"task": 1})


async def test_environment_without_seed_logs_once(caplog):
    class Unseeded(gym_environments.PlainEnvironment):
        pass

    for env in (Unseeded(), EnvironmentWrapper(Unseeded()), Unseeded()):
        observation, _ = await AsyncGymWrapper(env).reset(seed=1)
        assert observation.messages[0]["content"] == "first"
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "Unseeded.reset() has no argument `seed`"
    ]


def test_both_wrappers_have_the_same_spaces():
    awaited = wrap_as_gym(gym_environments.CountingEnvironment(), async_mode=True)
    with wrap_as_gym(gym_environments.CountingEnvironment()) as blocking:
        assert isinstance(blocking, GymWrapper)
        assert awaited.observation_space == blocking.observation_space == LLMRequestSpace()
        assert awaited.action_space == blocking.action_space == LLMResponseSpace()
    assert awaited.action_space is awaited.action_space


def test_allow_running_loop_is_for_the_blocking_wrapper():
    with pytest.raises(ValueError, match="async_mode=False"):
        wrap_as_gym(gym_environments.CountingEnvironment(), async_mode=True, allow_running_loop=True)


ACTIONS = (gym_environments.ACTION, gym_environments.ACTION)
fork = pytest.param("fork", marks=pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"))
KINDS = ["sync", fork, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("spawn", "forkserver"))]
FACTORIES = [
    functools.partial(gym_environments.make_counting_gym_of, 2),
    functools.partial(gym_environments.make_counting_gym_of, 4),
]


def vector(kind, factories, mode):
    if kind == "sync":
        return SyncVectorEnv(factories, autoreset_mode=mode)
    return AsyncVectorEnv(factories, shared_memory=False, context=kind, autoreset_mode=mode)


@pytest.fixture(params=KINDS)
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


def test_next_step_mode_resets_on_the_next_step(start):
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


def test_same_step_resets_immediately_with_final_info(start):
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


class _BreakingEnvironment(gym_environments.CountingEnvironment):
    async def step(self, action):
        raise LookupError("the box is gone")


def make_breaking_gym():
    return GymWrapper(_BreakingEnvironment())


@pytest.mark.filterwarnings("ignore::UserWarning")  # how Gymnasium tells of the workers that it shuts down
@pytest.mark.parametrize("kind", KINDS)
def test_worker_error_preserves_class_and_message(kind):
    envs = vector(kind, [make_breaking_gym] * 2, AutoresetMode.NEXT_STEP)
    envs.reset()
    with pytest.raises(LookupError, match="the box is gone"):
        envs.step(ACTIONS)
    envs.close(terminate=True)  # the workers are gone: there is nobody to be asked to close
    assert not any(process.is_alive() for process in getattr(envs, "processes", ()))


AFTER_STEP = "[assistant]\none more\n\n[user]\ntask 7, count 1, after one more"
AT_THE_END = "[assistant]\none more\n\n[end] terminated, reward 1"


def make_rendering_gym(render_mode="ansi"):
    return GymWrapper(gym_environments.CountingEnvironment(length=2), render_mode=render_mode)


def test_render_shows_the_last_exchange():
    with make_rendering_gym() as gym:
        assert gym.render() == ""
        gym.reset(options={"task": 7})
        assert gym.render() == "[user]\ntask 7"
        gym.step(gym_environments.ACTION)
        assert gym.render() == gym.render() == AFTER_STEP
        gym.step(gym_environments.ACTION)
        assert gym.render() == AT_THE_END
        gym.reset(options={"task": 8})
        assert gym.render() == "[user]\ntask 8"
    assert gym.render() == "[user]\ntask 8"


async def test_async_render_shows_the_last_exchange():
    async with wrap_as_gym(gym_environments.CountingEnvironment(length=2), async_mode=True, render_mode="ansi") as gym:
        assert isinstance(gym, AsyncGymWrapper)
        assert await gym.render() == ""
        await gym.reset(options={"task": 7})
        await gym.step(gym_environments.ACTION)
        assert await gym.render() == AFTER_STEP


def test_render_without_a_mode_returns_none():
    with wrap_as_gym(gym_environments.CountingEnvironment()) as gym:
        gym.reset()
        assert (gym.render_mode, gym.render()) == (None, None)


def test_failed_step_preserves_the_rendered_exchange():
    with wrap_as_gym(gym_environments.RaisingEnvironment(LookupError("gone")), render_mode="ansi") as gym:
        gym.reset()
        with pytest.raises(LookupError):
            gym.step(gym_environments.ACTION)
        assert gym.render() == "[user]\nfirst"


@pytest.mark.parametrize("async_mode", [False, True])
def test_unknown_render_mode_is_refused(async_mode):
    with pytest.raises(ValueError, match="render_mode to be 'ansi' or None, got 'rgb_array'"):
        wrap_as_gym(gym_environments.CountingEnvironment(), async_mode=async_mode, render_mode="rgb_array")
