"""Limits of a run around environments that know nothing of them, and around such as do."""

import asyncio
from typing import Any

import pytest

from ares_exp.environment import EnvironmentWrapper, EpisodeReport, LimitName, TimeStep, restart, truncation
from ares_exp.environment import transition as mid
from ares_exp.environments.episode_limits import EpisodeLimits, LimitedEnvironment, TimeLimits, limited
from ares_exp.errors import EpisodeStateError
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.records.results import EpisodeUsage
from ares_exp.rollout import run_episode
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collectors import MemoryTrajectoryCollector
from ares_exp.trajectories.records import serialize_llm_response

RESPONSE = LLMResponse.from_text("on", usage=Usage(6, 4), cost=0.25)


class Endless:
    """Counts its steps, for ever; gives half a point for each."""

    def __init__(self) -> None:
        self.count, self.closed, self.stuck = 0, 0, False
        self.actions: list[Any] = []

    async def reset(self) -> TimeStep[str]:
        self.count = 0
        return restart("step 0")

    async def step(self, action: Any) -> TimeStep[str]:
        self.actions.append(action)
        if self.stuck:
            await asyncio.Event().wait()
        self.count += 1
        return mid(f"step {self.count}", 0.5)

    async def close(self) -> None:
        self.closed += 1


class Scoring(Endless):
    """Can be asked to end."""

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        return truncation(self.count / 10) if limit != "cost" else None


class Timed(Endless):
    """Keeps a time limit by itself, and ends when there is no response."""

    time_left_sec = 0.01

    def grant_time(self, seconds: float) -> None: ...

    async def step(self, action: Any) -> TimeStep[str]:
        return truncation(0.0) if action is None else await super().step(action)


def limits(agent_sec: float | None = None, **more: Any) -> EpisodeLimits:
    return EpisodeLimits(time=TimeLimits(agent_timeout_sec=agent_sec), **more)


async def execute(env: LimitedEnvironment, steps: int) -> TimeStep[Any]:
    time_step = await env.reset()
    for _ in range(steps):
        assert not time_step.last()
        time_step = await env.step(RESPONSE)
    return time_step


@pytest.mark.parametrize(
    ("limit", "steps", "name"),
    [(limits(steps=3), 3, "steps"), (limits(tokens=11), 2, "tokens"), (limits(cost=1.0), 4, "cost")],
)
async def test_limits_apply_to_a_plain_environment(limit: EpisodeLimits, steps: int, name: str) -> None:
    inner = Endless()
    env = LimitedEnvironment(inner, limit)
    assert await execute(env, steps) == TimeStep("LAST", None, 1.0, f"step {steps}")
    assert (env.report().truncated_by, env.step_count, inner.closed) == (name, steps, 1)
    assert "Endless has no `truncate(limit)`" in (env.report().note or "")
    with pytest.raises(EpisodeStateError, match="has ended its episode"):
        await env.step(RESPONSE)
    assert await execute(env, steps) == env.time_step, "the next episode has all of it again"


async def test_termination_takes_precedence_over_a_limit() -> None:
    class Short(Endless):
        async def step(self, action: Any) -> TimeStep[Any]:
            return TimeStep("LAST", 1.0, 0.0, None)

    env = LimitedEnvironment(Short(), limits(steps=1))
    assert await execute(env, 1) == TimeStep("LAST", 1.0, 0.0, None)
    assert env.report() == EpisodeReport()
    with pytest.raises(EpisodeStateError, match="has ended its episode"):
        await env.step(RESPONSE)


async def test_environment_with_truncate_is_truncated_and_scored() -> None:
    env = LimitedEnvironment(Scoring(), limits(steps=2, cost=0.75))
    assert await execute(env, 2) == truncation(0.2)
    assert (env.report().truncated_by, env.report().note) == ("steps", None)
    unable = LimitedEnvironment(Scoring(), limits(cost=0.25))
    assert await execute(unable, 1) == TimeStep("LAST", None, 1.0, "step 1"), "it says that it cannot"


async def test_earlier_usage_counts_only_once() -> None:
    env = LimitedEnvironment(Endless(), limits(steps=3), used=EpisodeUsage(num_steps=2))
    assert (await execute(env, 1)).last()
    assert (await execute(env, 3)).last()


async def test_environment_with_same_limits_is_not_wrapped() -> None:
    env = limited(Endless(), limits(steps=3))
    assert isinstance(env, LimitedEnvironment)
    assert limited(env, limits(steps=3)) is env
    assert limited(EnvironmentWrapper(env), limits(steps=2)) is not env
    assert not EnvironmentWrapper(env).keeps(limits(steps=2))


async def test_steps_with_foreign_actions_count() -> None:
    env = LimitedEnvironment(Endless(), limits(steps=2, cost=1.0))
    await env.reset()
    assert (await env.step("left")).mid()
    assert (await env.step("right")).last()


@pytest.mark.parametrize("wrap", [lambda env: env, EnvironmentWrapper], ids=["bare", "wrapped"])
async def test_time_limit_applies_to_a_plain_environment(wrap: Any) -> None:
    inner = Endless()
    env = LimitedEnvironment(wrap(inner), limits(0.05))
    assert env.time_left_sec is None
    await env.reset()
    assert 0 < (env.time_left_sec or 0) <= 0.05
    env.grant_time(60)
    assert (env.time_left_sec or 0) > 50
    assert await env.step(None) == TimeStep("LAST", None, 1.0, "step 0")
    assert (inner.actions, env.time_left_sec, env.report().truncated_by) == ([], None, "time")


async def test_time_limit_during_a_step_ends_the_episode() -> None:
    inner = Scoring()
    env = LimitedEnvironment(inner, limits(0.05))
    await env.reset()
    inner.stuck = True
    last = await asyncio.wait_for(env.step(RESPONSE), 30)
    assert (last, inner.closed) == (TimeStep("LAST", None, 1.0, "step 0"), 1), "nobody knows in what state it is"


async def test_response_after_the_time_limit_is_ignored() -> None:
    inner = Scoring()
    env = LimitedEnvironment(inner, limits(0.02))
    await env.reset()
    await asyncio.sleep(0.03)
    assert (await env.step(RESPONSE), inner.actions) == (truncation(0.0), [])


@pytest.mark.parametrize("wrap", [lambda env: env, EnvironmentWrapper], ids=["bare", "wrapped"])
async def test_timed_environment_receives_a_missing_response(wrap: Any) -> None:
    async def policy(request: Any) -> LLMResponse:
        await asyncio.Event().wait()
        raise AssertionError

    last = await asyncio.wait_for(run_episode(LimitedEnvironment(wrap(Timed()), limits(3600)), policy), 30)
    assert last == truncation(0.0)


@pytest.mark.parametrize(("given", "total"), [(0.5, 1.0), (0.0, None)])
async def test_trajectory_contains_limit_and_rewards(given: float, total: float | None) -> None:
    class Giving(Endless):
        async def step(self, action: Any) -> TimeStep[str]:
            return (await super().step(action))._replace(reward=given)

    collector = MemoryTrajectoryCollector()
    env = TrajectoryCollectingEnvironment(LimitedEnvironment(Giving(), limits(steps=3)), collector)
    time_step = await env.reset()
    while not time_step.last():
        time_step = await env.step(RESPONSE)
    assert env.trajectory is not None
    episode = env.trajectory
    assert (episode.outcome, episode.truncated, episode.limit, episode.total_reward) == (
        "truncated",
        True,
        "steps",
        total,
    )
    assert (episode.task_name, episode.num_steps) == ("Giving", 4)
    assert episode.steps[-1].action == serialize_llm_response(RESPONSE)
