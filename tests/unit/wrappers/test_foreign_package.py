"""An environment that another package wrote, knowing the protocol and none of our classes."""

import dataclasses
import json
import random

import pytest

from ares_exp.environment import Environment, complete
from ares_exp.llms.request import LLMRequest
from ares_exp.policies.episode_events import EpisodeEvents
from ares_exp.rollout import run_episode
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.trajectories.collectors.null_collector import NullTrajectoryCollector
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.wrappers.async_gym import drive_async_gym
from ares_exp.wrappers.gym_in_thread import drive_sync_gym
from ares_exp.wrappers.spaces import LLMRequestSpace
from ares_exp.wrappers.sync_gym import GymWrapper
from tests.unit.wrappers.gym_environments import ACTION


class OtherTimeStep:
    """The same four fields, and nothing else in common: no tuple, no methods, no equality."""

    __slots__ = ("discount", "observation", "reward", "step_type")

    def __init__(self, step_type, reward, discount, observation):
        self.step_type, self.reward, self.discount, self.observation = step_type, reward, discount, observation


@dataclasses.dataclass
class Prompt:
    messages: list
    temperature: float = 0.5
    board: str = ""


class Guessing:
    """Three guesses. Keeps one message list and appends to it, as careless code does."""

    def __init__(self):
        self._random, self._messages, self.closed = random.Random(0), [], 0

    async def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._random.seed(seed)
        self._messages = [{"role": "user", "content": f"guess {self._random.randrange(1000)}"}]
        return OtherTimeStep("FIRST", None, None, Prompt(list(self._messages)))

    async def step(self, action):
        self._messages += [{"role": "assistant", "content": action.text}, {"role": "user", "content": "no"}]
        if len(self._messages) < 7:
            return OtherTimeStep("MID", 0, 1, Prompt(list(self._messages)))
        return OtherTimeStep("LAST", 1, 0, None)

    async def close(self):
        self.closed += 1

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.close()


@pytest.fixture
def env():
    made = Guessing()
    assert isinstance(made, Environment)
    yield made
    assert made.closed == 1


def test_foreign_environment_runs_in_gym_wrapper(env):
    with GymWrapper(env, render_mode="ansi") as gym:
        observation, info = gym.reset(seed=1)
        assert type(info["time_step"]) is OtherTimeStep
        assert type(observation) is Prompt
        assert observation in gym.observation_space
        assert gym.step(ACTION)[1:4] == (0.0, False, False)
        assert gym.render() == "[assistant]\none more\n\n[user]\nno"
        gym.step(ACTION)
        observation, *rest, info = gym.step(ACTION)
        assert rest == [1.0, True, False]
        assert observation in gym.observation_space


@pytest.mark.parametrize("drive", [complete, drive_async_gym, drive_sync_gym])
@pytest.mark.parametrize("collect", ["json", "null", "no"])
async def test_foreign_environment_runs_in_recorded_rollouts(env, drive, collect, tmp_path):
    async def policy(request):
        assert request.messages[-1]["role"] == "user"
        return ACTION

    ran = env
    if collect != "no":
        collector = JsonTrajectoryCollector(tmp_path / "kept") if collect == "json" else NullTrajectoryCollector()
        ran = TrajectoryCollectingEnvironment(env, collector)
    events = EpisodeEvents()
    last = await run_episode(drive(ran), policy, events)
    assert (last.step_type, last.reward, events.usage.num_steps) == ("LAST", 1, 3)
    if collect == "no":
        return
    assert ran.collector_failures == 0
    if collect == "json":
        [file] = (tmp_path / "kept").glob("*.json")
        episode = EpisodeTrajectory.load(file)
        assert (episode.outcome, episode.total_reward, episode.num_steps) == ("completed", 1.0, 4)
        assert [step.step_type for step in episode.steps] == ["FIRST", "MID", "MID", "LAST"]
        assert [len(step.observation["messages"]) for step in episode.steps[:3]] == [1, 3, 5]
        assert episode.steps[0].observation["temperature"] == 0.5


def test_foreign_requests_serialize_to_ours():
    space, prompt = LLMRequestSpace(), Prompt([{"role": "user", "content": "hi"}], board="x")
    [back] = space.from_jsonable(json.loads(json.dumps(space.to_jsonable([prompt]))))
    assert back == LLMRequest(messages=[{"role": "user", "content": "hi"}], temperature=0.5)
