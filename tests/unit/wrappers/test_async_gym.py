import pytest

from ares_exp.environment import EnvironmentWrapper, EpisodeReport, restart, termination, transition, truncation
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.wrappers.async_gym import NO_REQUEST, AsyncGymWrapper, EpisodeInfo, to_gym, wrap_as_gym
from ares_exp.wrappers.spaces import LLMRequestSpace, LLMResponseSpace
from ares_exp.wrappers.sync_gym import GymWrapper
from tests.unit.wrappers.gym_environments import (
    ACTION,
    BareEnvironment,
    CountingEnvironment,
    ForeignTimeStep,
    PassingOnEnvironment,
    PlainEnvironment,
)

REQUEST = LLMRequest(messages=[{"role": "user", "content": "?"}])


@pytest.mark.parametrize(
    ("time_step", "expected"),
    [
        (restart(REQUEST), (REQUEST, 0.0, False, False)),
        (transition(REQUEST, 0.5), (REQUEST, 0.5, False, False)),
        (termination(1.0), (NO_REQUEST, 1.0, True, False)),
        (truncation(0.75), (NO_REQUEST, 0.75, False, True)),
        (truncation(None), (NO_REQUEST, 0.0, False, True)),
        (ForeignTimeStep("LAST", 1, 0, REQUEST), (REQUEST, 1.0, True, False)),
        (ForeignTimeStep("LAST", 1, 0.9, None), (NO_REQUEST, 1.0, False, True)),
    ],
)
def test_what_a_time_step_becomes(time_step, expected):
    values = to_gym(time_step)
    assert values == expected
    assert [type(value) for value in values[1:]] == [float, bool, bool]
    assert values[0] in LLMRequestSpace()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (ForeignTimeStep(2, 0.0, 0.0, None), "step_type FIRST, MID or LAST, got 2"),
        (truncation(1.0)._replace(discount=None), "to have a discount"),
    ],
)
def test_a_broken_time_step_is_refused(broken, said):
    with pytest.raises(ValueError, match=said):
        to_gym(broken)


async def test_an_episode():
    env = CountingEnvironment(length=2)
    async with wrap_as_gym(env, async_mode=True) as gym:
        assert isinstance(gym, AsyncGymWrapper)
        assert gym.environment is env
        observation, info = await gym.reset(options={"task": 7})
        assert observation == info["time_step"].observation
        assert observation.messages[0]["content"] == "task 7"
        _, reward, terminated, truncated, _ = await gym.step(ACTION)
        assert (reward, terminated, truncated) == (0.25, False, False)
        observation, reward, terminated, truncated, info = await gym.step(ACTION)
        assert (observation, reward, terminated, truncated) == (NO_REQUEST, 1.0, True, False)
        assert info["time_step"] == termination(1.0)
    assert env.exits == [None]


class ReportingEnvironment(CountingEnvironment):
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


async def test_info_of_an_environment_that_reports_nothing():
    async with AsyncGymWrapper(BareEnvironment(length=1)) as gym:
        _, info = await gym.reset()
        assert (info["task"], info["outcome"], info["rewards"]) == (None, None, {})
        *_, info = await gym.step("of another package")
        assert (info["step"], info["outcome"], info["usage"]["prompt_tokens"]) == (1, "completed", 0)


async def test_a_seed_repeats_the_tasks():
    gym = AsyncGymWrapper(PassingOnEnvironment(CountingEnvironment()))

    async def two_tasks(seed):
        return (await gym.reset(seed=seed))[0], (await gym.reset())[0]

    assert await two_tasks(0) == await two_tasks(0)
    assert await two_tasks(0) != await two_tasks(1)


async def test_an_environment_that_takes_no_options_says_so():
    with pytest.raises(TypeError, match=r"with options, but PlainEnvironment\.reset\(\) does not take them, got"):
        await AsyncGymWrapper(PlainEnvironment()).reset(seed=1, options={"task": 1})


async def test_an_environment_that_takes_no_seed_is_reset_without_and_that_is_logged_once(caplog):
    class Unseeded(PlainEnvironment):
        pass

    for env in (Unseeded(), EnvironmentWrapper(Unseeded()), Unseeded()):
        observation, _ = await AsyncGymWrapper(env).reset(seed=1)
        assert observation.messages[0]["content"] == "first"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["Unseeded.reset() takes no `seed`"]


async def test_nothing_given_is_nothing_passed_on():
    observation, _ = await AsyncGymWrapper(PlainEnvironment()).reset(seed=None, options={})
    assert observation.messages[0]["content"] == "first"


def test_both_wrappers_have_the_same_spaces():
    awaited = wrap_as_gym(CountingEnvironment(), async_mode=True)
    with wrap_as_gym(CountingEnvironment()) as blocking:
        assert isinstance(blocking, GymWrapper)
        assert awaited.observation_space == blocking.observation_space == LLMRequestSpace()
        assert awaited.action_space == blocking.action_space == LLMResponseSpace()
    assert awaited.action_space is awaited.action_space


def test_allow_running_loop_is_for_the_blocking_wrapper():
    with pytest.raises(ValueError, match="async_mode=False"):
        wrap_as_gym(CountingEnvironment(), async_mode=True, allow_running_loop=True)
