"""Several LLM calls of one agent at once: asked at the same time, observed and recorded in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environment import EnvironmentWrapper, TimeStep
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import PolicyError, RefusalError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.policies.asked_ahead import counted_when_awaited
from ares_exp.policies.episode_events import EpisodeEvents
from ares_exp.rollout import run_episode
from ares_exp.runs.resume.resumable_policy import ResumablePolicy
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import PlannedEpisode
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import EpisodeCollector
from ares_exp.trajectories.recorded_responses import responses
from ares_exp.trajectories.response_log import LoggedEpisode, logged_episodes
from ares_exp.wrappers.async_gym import drive_async_gym
from ares_exp.wrappers.sync_gym import drive_sync_gym
from tests.unit.environments.snapshots import agent_of, ask
from tests.unit.runs.resume.logs import log_in

pytestmark = [pytest.mark.local, pytest.mark.timeout(60)]

EPISODE = LoggedEpisode("e", "task", 0, 0, 7, 1.0)


@dataclass
class Model:
    """A policy that may be asked for several responses at once: what it does with each request is chosen by its text.

    Attributes:
        asked: What it was asked, in order.
        given_up: What was cancelled.
        at_once: How many requests were running at once, at most.
    """

    does: Callable[[Model, str], Awaitable[None]]
    max_concurrency_per_episode: int = 16
    asked: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    at_once: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    in_progress: int = 0
    answered: list[str] = field(default_factory=list)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        text = str(request.messages[0]["content"])
        self.asked.append(text)
        self.in_progress += 1
        self.at_once = max(self.at_once, self.in_progress)
        await self.tell()
        try:
            await self.does(self, text)
        except asyncio.CancelledError:
            self.given_up.append(text)
            raise
        finally:
            self.in_progress -= 1
        self.answered.append(text)
        await self.tell()
        return LLMResponse.from_text(text.upper(), usage=Usage(10, 1), cost=1.0)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(is_so)

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


async def backwards(model: Model, text: str) -> None:
    """Answers a to e in reverse, once all are asked."""
    await model.until(lambda: len(model.asked) == 5 and all(one in model.answered for one in "abcde" if one > text))


async def at_once(model: Model, text: str) -> None:
    """Responses."""


heard: dict[str, str] = {}


async def five(container: Any, llm: Any) -> None:
    async def hear(text: str) -> None:
        heard[text] = (await llm(ask(text))).text

    await asyncio.gather(*(hear(text) for text in "abcde"))


def observed(env: TrajectoryCollectingEnvironment) -> list[tuple[str, str]]:
    """The requests of an episode's steps, and what each was answered."""
    steps = env.trajectory.steps
    return [
        (step.observation["messages"][0]["content"], after.action["data"][0]["content"])
        for step, after in pairwise(steps)
        if step.observation is not None and after.action is not None
    ]


IN_ORDER = [(text, text.upper()) for text in "abcde"]


@pytest.mark.parametrize("drive", [lambda env: env, drive_async_gym])
async def test_calls_are_concurrent_and_observed_in_order(make_environment: Any, drive: Any) -> None:
    heard.clear()
    model, events = Model(backwards), EpisodeEvents()
    env = TrajectoryCollectingEnvironment(make_environment(agent=agent_of(five)), EpisodeCollector())
    await run_episode(drive(env), model, events)
    assert (model.asked, model.answered) == ([*"abcde"], [*"edcba"])
    assert (observed(env), heard) == (IN_ORDER, dict(IN_ORDER))
    assert (events.usage.num_steps, events.usage.tokens, events.usage.cost) == (5, 55, 5.0)


async def test_concurrency_per_episode_is_bounded(make_environment: Any) -> None:
    async def in_twos(model: Model, text: str) -> None:
        await model.until(lambda: model.in_progress == 2 or len(model.answered) == 4)

    model = Model(in_twos, max_concurrency_per_episode=2)
    env = TrajectoryCollectingEnvironment(make_environment(agent=agent_of(five)), EpisodeCollector())
    await run_episode(env, model)
    assert (model.at_once, observed(env)) == (2, IN_ORDER)


@pytest.mark.parametrize("drive", [lambda env: env, drive_sync_gym])
async def test_policy_is_called_sequentially_by_default(make_environment: Any, drive: Any) -> None:
    model = Model(at_once)

    async def plain(request: LLMRequest) -> LLMResponse:
        return await model(request)

    env = TrajectoryCollectingEnvironment(make_environment(agent=agent_of(five)), EpisodeCollector())
    await run_episode(drive(env), plain if drive is not drive_sync_gym else model)
    assert (model.at_once, model.asked, observed(env)) == (1, [*"abcde"], IN_ORDER)


async def test_new_call_starts_while_another_is_pending(make_environment: Any) -> None:
    """Two conversations with commands between their calls: neither waits for the other's answer."""

    async def two_conversations(container: Any, llm: Any) -> None:
        async def conversation(name: str, commands: int) -> None:
            await llm(ask(f"{name}1"))
            for _ in range(commands):
                await container.exec("true")
            await llm(ask(f"{name}2"))

        await asyncio.gather(conversation("a", 0), conversation("b", 3))

    async def wait_for_b2(model: Model, text: str) -> None:
        if text == "a2":
            await model.until(lambda: "b2" in model.asked)

    model = Model(wait_for_b2)
    env = TrajectoryCollectingEnvironment(make_environment(agent=agent_of(two_conversations)), EpisodeCollector())
    await run_episode(env, model)
    assert observed(env) == [(text, text.upper()) for text in ("a1", "b1", "a2", "b2")]


async def test_abandoned_calls_of_the_agent_are_cancelled(make_environment: Any) -> None:
    model: Model

    async def first_of_five(container: Any, llm: Any) -> None:
        calls = [asyncio.create_task(llm(ask(text))) for text in "abcde"]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        for call in calls[1:]:
            call.cancel()
        while len(model.given_up) < 3:  # the step does not end before
            await container.exec("true")

    async def a_and_c(model: Model, text: str) -> None:
        if text == "a":
            await model.until(lambda: "c" in model.answered and len(model.asked) == 5)
        elif text != "c":
            await asyncio.Event().wait()

    model, events = Model(a_and_c), EpisodeEvents()
    last = await run_episode(make_environment(agent=agent_of(first_of_five)), model, events)
    assert (last.step_type, sorted(model.given_up)) == ("LAST", [*"bde"])
    assert (events.usage.num_steps, events.usage.cost) == (1, 2.0), "c was paid for, and had no turn"


async def test_pending_calls_are_cancelled_at_episode_end(make_environment: Any) -> None:
    async def only_a(model: Model, text: str) -> None:
        if text != "a":
            await asyncio.Event().wait()
        await model.until(lambda: len(model.asked) == 5)

    class Recorded(EpisodeEvents):
        async def ended(self) -> None:
            assert model.in_progress == 0, "before the row is written"

    model = Model(only_a)
    env = make_environment(agent=agent_of(five), limits=EpisodeLimits(steps=1))
    last = await run_episode(env, model, Recorded())
    assert (last.discount, sorted(model.given_up)) == (1.0, [*"bcde"])


async def test_limits_are_checked_before_prefetching(make_environment: Any) -> None:
    model, limits = Model(at_once), EpisodeLimits(steps=2)
    events = RunningEpisode(planned=PlannedEpisode("e", "task", 0, 7), limits=limits)
    await run_episode(make_environment(agent=agent_of(five), limits=limits), model, events)
    assert (model.asked, events.usage.num_steps) == ([*"ab"], 2)
    tokens = RunningEpisode(planned=PlannedEpisode("e", "task", 0, 7), limits=EpisodeLimits(tokens=11))
    tokens.pay(LLMResponse.from_text("a", usage=Usage(10, 1)))
    assert not tokens.has_room(0), "what is paid for counts, whether or not it is applied"


async def test_failure_is_raised_in_its_turn(make_environment: Any) -> None:
    async def b_is_refused(model: Model, text: str) -> None:
        if text == "a":
            await model.until(lambda: len(model.asked) == 5)
        if text == "b":
            refusal = RefusalError("b is refused")
            refusal.response = LLMResponse.from_text("no", cost=0.5)
            raise refusal
        if text == "c":
            raise SystemExit(3)

    events = EpisodeEvents()
    env = TrajectoryCollectingEnvironment(make_environment(agent=agent_of(five)), EpisodeCollector())
    with pytest.raises(PolicyError, match="b is refused"):
        await run_episode(env, Model(b_is_refused), events)
    assert observed(env) == IN_ORDER[:1]
    assert (events.usage.num_steps, events.usage.cost) == (1, 3.5)


async def test_observation_wrapper_prevents_prefetching(make_environment: Any) -> None:
    class Louder(EnvironmentWrapper):
        async def reset(self, **more: Any) -> TimeStep[Any]:
            return self._edited(await super().reset(**more))

        async def step(self, action: Any) -> TimeStep[Any]:
            return self._edited(await super().step(action))

        def _edited(self, step: TimeStep[Any]) -> TimeStep[Any]:
            if step.last():
                return step
            return step._replace(observation=ask(f"{step.observation.messages[0]['content']}!"))

    model = Model(at_once)
    await run_episode(Louder(make_environment(agent=agent_of(five))), model)
    assert (model.asked, model.at_once) == ([f"{text}!" for text in "abcde"], 1)


async def test_parallel_waits_count_once(make_environment: Any) -> None:
    """Five requests that wait 100 s side by side: the episode waits 100 s, not 500."""
    events, env = EpisodeEvents(), make_environment(agent=agent_of(five))
    wait = counted_when_awaited(events.waited)

    async def waits(model: Model, text: str) -> None:
        wait(100.0)
        if text == "a":
            await model.until(lambda: len(model.answered) == 4)

    await run_episode(env, Model(waits), events)
    assert events.waited_sec == 100.0


async def test_wait_continues_to_count_in_its_turn(make_environment: Any) -> None:
    events, env = EpisodeEvents(), make_environment(agent=agent_of(five))
    wait = counted_when_awaited(events.waited)

    async def b_waits(model: Model, text: str) -> None:
        if text == "b":
            wait(100.0)
            await model.until(lambda: events.waited_sec > 0)
        else:
            await model.until(lambda: len(model.asked) == 5)

    model = Model(b_waits)
    telling = asyncio.create_task(_tell_now_and_then(model))
    await run_episode(env, model, events)
    telling.cancel()
    assert 90.0 < events.waited_sec <= 100.0, "what had passed before its turn is not granted"


async def _tell_now_and_then(model: Model) -> None:
    while True:
        await asyncio.sleep(0.01)
        await model.tell()


async def execute(env: CodeEnvironment, model: Model, folder: Path, **earlier: Any) -> tuple[list[str], EpisodeEvents]:
    """Runs an episode with a log of responses; returns what was asked, in order."""
    events = EpisodeEvents()
    log = log_in(folder / "responses", EPISODE)
    log.start(earlier.get("earlier", ()), earlier.get("ahead", ()))
    await run_episode(env, ResumablePolicy(model, log, events=events, **earlier), events)
    return model.asked, events


async def killed_at(folder: Path, env: CodeEnvironment, applied: int) -> LoggedEpisode:
    """The log of an episode in which all but the first unanswered one were answered, as it is after `kill -9`."""
    reached = asyncio.Event()

    async def stuck(model: Model, text: str) -> None:
        if text >= "abcde"[applied]:
            await model.until(lambda: len(model.asked) == 5)
        if text == "abcde"[applied]:
            await model.until(lambda: all(one in model.answered for one in "abcde" if one != text))
            await asyncio.sleep(0)
            reached.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(execute(env, Model(stuck), folder))
    await reached.wait()
    [log] = logged_episodes(folder / "responses")
    running.cancel()
    await asyncio.wait({running})
    return log


@pytest.mark.parametrize("applied", [0, 2])
async def test_prefetched_responses_are_not_paid_again(
    make_environment: Any, make_task: Any, tmp_path: Path, applied: int
) -> None:
    agent, task = agent_of(five), make_task()
    log = await killed_at(tmp_path, make_environment(task, agent=agent), applied)
    assert [response.text for response in responses(log.exchanges)] == [*"ABCDE"[:applied]]
    assert sorted(response.text for response in responses(log.ahead)) == [*"ABCDE"[applied + 1 :]]
    heard.clear()
    env = TrajectoryCollectingEnvironment(make_environment(task, agent=agent), EpisodeCollector())
    asked, events = await execute(env, Model(at_once), tmp_path, earlier=log.exchanges, ahead=log.ahead)  # type: ignore[arg-type]
    assert (asked, observed(env), heard) == ([*"abcde"[applied]], IN_ORDER, dict(IN_ORDER))
    assert (events.usage.num_steps, events.usage.cost) == (5, 5.0)
    [again] = logged_episodes(tmp_path / "responses")
    assert [response.text for response in responses(again.exchanges)] == [*"ABCDE"]
    assert (again.ahead, len(again.ahead_taken_over)) == ((), 4 - applied)


async def test_snapshot_between_responses_resumes_all_calls(make_environment: Any, store: Path, restore: Any) -> None:
    agent = agent_of(five)
    env = make_environment(agent=agent)
    await env.reset()
    await env.step(LLMResponse.from_text("A"))
    snapshot = await env.export_state(store)
    heard.clear()
    restored = await restore(snapshot, code_agent_factory=agent, start=False)
    model = Model(backwards, asked=["a"])
    collecting = TrajectoryCollectingEnvironment(restored, EpisodeCollector())
    await run_episode(collecting, model)
    assert (model.asked, model.answered, heard) == ([*"abcde"], [*"edcb"], dict(IN_ORDER))
