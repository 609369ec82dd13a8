"""The contract: three methods are enough, and a wrapper passes on whatever else an environment can do."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.activity import Activity
from ares_exp.environment import (
    Environment,
    EnvironmentBase,
    EnvironmentWrapper,
    EpisodeReport,
    LimitName,
    OneCallAtATime,
    PastStep,
    PendingRequest,
    TimeStep,
    complete,
    restart,
    termination,
    transition,
    truncation,
)
from ares_exp.errors import EpisodeStateError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.episode_events import EpisodeEvents
from ares_exp.rollout import run_episode
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collectors import NullTrajectoryCollector


@pytest.mark.parametrize(
    ("step", "expected", "flags"),
    [
        (restart("o"), ("FIRST", None, None, "o"), (True, False, False)),
        (transition("o"), ("MID", 0.0, 1.0, "o"), (False, True, False)),
        (transition("o", 0.5), ("MID", 0.5, 1.0, "o"), (False, True, False)),
        (termination(1.0), ("LAST", 1.0, 0.0, None), (False, False, True)),
        (truncation(0.25), ("LAST", 0.25, 1.0, None), (False, False, True)),
        (truncation(None), ("LAST", None, 1.0, None), (False, False, True)),
    ],
)
def test_each_step_type_has_its_fields(
    step: TimeStep[str], expected: tuple[object, ...], flags: tuple[bool, ...]
) -> None:
    assert tuple(step) == expected
    assert (step.first(), step.mid(), step.last()) == flags


class Typed(Environment[LLMResponse, LLMRequest, float, float]):
    """One that says what it takes and gives."""

    async def reset(self) -> TimeStep[LLMRequest, float, float]:
        return restart(LLMRequest([]))

    async def step(self, action: LLMResponse) -> TimeStep[LLMRequest, float, float]:
        return TimeStep[LLMRequest, float, float]("LAST", 1.0, 0.0, None)

    async def close(self) -> None:
        pass

    async def __aenter__(self) -> Typed:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_time_steps_and_environments_take_type_arguments() -> None:
    environment: Environment[LLMResponse, LLMRequest] = Typed()
    time_step: TimeStep[LLMRequest] = await environment.reset()
    assert time_step.observation == LLMRequest([])
    assert (await environment.step(LLMResponse.from_text("done"))).last()
    assert isinstance(environment, Environment)
    assert typing.get_type_hints(Typed.reset)["return"] == TimeStep[LLMRequest] == TimeStep[LLMRequest, float, float]


class Bare:
    """All that an environment needs."""

    closed = 0

    async def reset(self) -> TimeStep[str]:
        return restart("first")

    async def step(self, action: Any) -> TimeStep[str]:
        return termination(1.0)

    async def close(self) -> None:
        self.closed += 1


class Able(Bare):
    """Has every member, and derives from nothing: another package's."""

    step_count = 3
    current_task = "a task"
    time_step = transition("pending")
    time_left_sec = 7.0
    activity = Activity(0.5)
    past_steps = (PastStep(restart("first"), None, 1.0, None, 0.5, Activity()),)

    def __init__(self) -> None:
        self.granted = 0.0
        self.asked: list[object] = []

    def report(self) -> EpisodeReport:
        return EpisodeReport(task_name="a task", truncated_by="luck")

    def grant_time(self, seconds: float) -> None:
        self.granted += seconds

    async def truncate(self, limit: LimitName) -> TimeStep[Any]:
        return truncation(0.25)

    async def export_state(self, output_dir: str | Path, *, snapshot_id: str | None = None) -> Any:
        self.asked.append((output_dir, snapshot_id))

    async def fork(self, n: int, *, diversify: bool = False) -> Sequence[Any]:
        return [(n, diversify)]

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        return (PendingRequest(1, "main", "pending"),)

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        return (*known, PendingRequest(2, "main", "new"))


def wrappers(env: Any) -> list[EnvironmentWrapper]:
    return [
        EnvironmentWrapper(env),
        EnvironmentWrapper(EnvironmentWrapper(env)),
        TrajectoryCollectingEnvironment(env, NullTrajectoryCollector()),
    ]


def test_complete_environment_is_unchanged() -> None:
    wrapper = EnvironmentWrapper(Bare())
    assert complete(wrapper) is wrapper


async def test_only_an_environment_with_time_left_is_timed() -> None:
    class Unseeded(EnvironmentBase):
        async def reset(self) -> TimeStep[str]:  # type: ignore[override]
            return restart("first")

    env = complete(Unseeded())
    assert (await env.reset(seed=3)).observation == "first"
    assert [complete(one).is_timed for one in (Unseeded(), Bare(), Able())] == [False, False, True]
    assert [EnvironmentWrapper(one).is_timed for one in (Unseeded(), Bare(), Able())] == [False, False, True]


@pytest.mark.parametrize("number", range(3))
async def test_wrapper_forwards_every_member(number: int) -> None:
    env = Able()
    wrapper = wrappers(env)[number]
    assert wrapper.unwrapped is env
    assert wrapper.report() == env.report()
    assert (wrapper.step_count, wrapper.current_task, wrapper.time_step) == (3, "a task", transition("pending"))
    assert wrapper.time_left_sec == 7.0
    wrapper.grant_time(2.0)
    assert env.granted == 2.0
    assert (wrapper.activity, wrapper.past_steps) == (env.activity, env.past_steps)
    assert wrapper.pending_requests() == (PendingRequest(1, "main", "pending"),)
    assert await wrapper.changed_requests(()) == (PendingRequest(2, "main", "new"),)
    await wrapper.export_state("store", snapshot_id="mine")
    assert env.asked == [("store", "mine")]
    assert [*await wrapper.fork(2, diversify=True)] == [(2, True)]
    assert await wrapper.truncate("steps") == truncation(0.25)


@pytest.mark.parametrize("number", range(3))
async def test_missing_members_have_neutral_values(number: int) -> None:
    wrapper = wrappers(Bare())[number]
    assert wrapper.report() == EpisodeReport()
    assert (wrapper.step_count, wrapper.current_task, wrapper.time_step, wrapper.time_left_sec) == (0, None, None, None)
    assert (wrapper.activity, wrapper.past_steps, wrapper.pending_requests()) == (None, (), ())
    waiting = asyncio.ensure_future(wrapper.changed_requests(()))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "nobody announces anything"
    waiting.cancel()
    wrapper.grant_time(1.0)
    assert await wrapper.truncate("steps") is None
    for capture in (wrapper.export_state("store"), wrapper.fork(1)):
        with pytest.raises(SnapshotUnsupportedError, match="Bare has no `export_state`"):
            await capture


@pytest.mark.parametrize("number", range(3))
async def test_three_methods_are_an_environment(number: int) -> None:
    async def policy(request: Any) -> LLMResponse:
        return LLMResponse.from_text("yes")

    env = Bare()
    for ran in (env, wrappers(env)[number]):
        assert (await run_episode(ran, policy, EpisodeEvents())).reward == 1.0
    assert env.closed == 2
    async with wrappers(env)[number] as entered:
        assert (await entered.reset(seed=4)).observation == "first"
    assert env.closed == 3


async def test_unsupported_reset_options_are_refused() -> None:
    class TakesSeed(Bare):
        async def reset(self, seed: int | None = None) -> TimeStep[str]:
            return restart(f"seed {seed}")

    class TakesAnything(Bare):
        async def reset(self, **more: Any) -> TimeStep[Any]:
            return restart(more)

    env = EnvironmentWrapper(EnvironmentWrapper(TakesSeed()))
    assert (await env.reset(seed=3, options={})).observation == "seed 3"
    with pytest.raises(TypeError, match=r"TakesSeed.reset\(\) does not accept options, but got {'task': 'a'}"):
        await env.reset(seed=3, options={"task": "a"})
    given = {"seed": 3, "options": {"task": "a"}}
    assert (await complete(TakesAnything()).reset(**given)).observation == given  # type: ignore[arg-type]


async def test_concurrent_calls_are_refused() -> None:
    calls, go_on = OneCallAtATime(), asyncio.Event()

    async def step() -> None:
        with calls.during("step()"):
            await go_on.wait()

    stepping = asyncio.create_task(step())
    await asyncio.sleep(0)
    with pytest.raises(EpisodeStateError, match=r"was called while step\(\) is running"), calls.during("reset()"):
        pass
    go_on.set()
    await stepping
    with calls.during("reset()"):
        assert calls.in_progress == "reset()"


def test_repr_of_a_time_step_is_shortened() -> None:
    request = LLMRequest([{"role": "user", "content": "x" * 5000}], stop_sequences=["last"])
    shown = repr(restart(request))
    assert shown.startswith("TimeStep('FIRST', reward=None, discount=None, observation=LLMRequest(messages=")
    assert " … " in shown
    assert len(shown) < 300
    assert repr(termination(1.0)) == "TimeStep('LAST', reward=1.0, discount=0.0, observation=None)"
