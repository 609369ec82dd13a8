"""Which task is chosen, and what becomes of an episode that another one follows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.environment import EpisodeReport, TimeStep, restart, termination
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EpisodeParts, Report
from ares_exp.errors import ConfigError, EpisodeStateError, PreflightError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.runs.scheduler import episode_seed
from ares_exp.wrappers.registry import TaskSamplingEnvironment

RESPONSE = LLMResponse.from_text("yes")


class AskingEnvironment:
    """Asks once. Its first request says with what it was made."""

    def __init__(self, source: AskingSource, task: str, seed: int) -> None:
        self.source = source
        self.seed = seed
        self.asks = f"{task} {seed}"
        self.closed = False

    async def reset(self) -> TimeStep[LLMRequest]:
        if self.source.broken:
            raise RuntimeError("broken")
        await self.source.gate.wait()
        return restart(LLMRequest(messages=[{"role": "user", "content": self.asks}]))

    async def step(self, action: Any) -> TimeStep[LLMRequest]:
        await self.source.gate.wait()
        return termination(1.0)

    async def close(self) -> None:
        self.closed = True


class AskingSource:
    """A source of them, which says what it is called for."""

    path = None

    def __init__(self, needs_container: bool = False) -> None:
        self.needs_container = needs_container
        self.made: list[AskingEnvironment] = []
        self.calls: list[str] = []
        self.broken = False
        self.gate = asyncio.Event()
        self.gate.set()

    def load(self, report: Report) -> Sequence[str]:
        return ["a", "b", "c"]

    async def preflight(self) -> None:
        self.calls.append("preflight")

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        self.calls.append("check")

    def make(self, task_name: str, parts: EpisodeParts) -> Any:
        self.made.append(AskingEnvironment(self, task_name, parts.seed))
        return self.made[-1]

    async def close(self) -> None:
        self.calls.append("close")


def environment(source: AskingSource, names: Iterable[str] = "abc", seed: int = 0) -> TaskSamplingEnvironment:
    parts = EpisodeParts(DockerContainerFactory(), ShellAgentFactory(), EpisodeLimits(), seed=seed)
    return TaskSamplingEnvironment(source, [*names], parts)


async def chosen(env: TaskSamplingEnvironment, count: int = 8, **options: Any) -> list[str]:
    asked = [await env.reset(**options)]
    asked += [await env.reset() for _ in range(count - 1)]
    return [str(step.observation.messages[0]["content"]) for step in asked]  # type: ignore[union-attr]


async def test_same_seed_gives_the_same_episodes() -> None:
    first, second = environment(AskingSource(), seed=3), environment(AskingSource())
    assert await chosen(first) == (again := await chosen(second, seed=3))
    assert again == await chosen(second, seed=3)
    assert {asked[0] for asked in again} == {*"abc"}
    assert len({*again}) == len(again), "an attempt at the same task has a seed of its own"
    assert again != await chosen(second, seed=4)


async def test_episode_has_the_seed_of_a_run() -> None:
    env = environment(AskingSource())
    for attempt in range(2):
        await env.reset(seed=None if attempt else 7, options={"task": "b"})
        assert (env.attempt, env.episode_seed) == (attempt, episode_seed(7, "b", attempt))
        assert env.unwrapped.seed == env.episode_seed, "which its environment was made with"
        report = env.report()
        assert (env.current_task, report.task_name) == ("b", "b")
        assert (report.attempt, report.seed) == (attempt, env.episode_seed)


async def test_task_is_selected_by_name_or_index() -> None:
    env = environment(AskingSource(), "bc")
    await env.reset(options={"task": 1})
    assert env.current_task == "c"
    await env.reset(options={"task": "b"})
    assert env.current_task == "b"
    for wrong in ({"task": "a"}, {"task": 2}, {"tusk": "b"}):
        with pytest.raises(ConfigError, match="got"):
            await env.reset(options=wrong)
    with pytest.raises(ConfigError, match="at least one task"):
        environment(AskingSource(), "")


async def test_episode_is_closed_before_the_next() -> None:
    source = AskingSource()
    async with environment(source) as env:
        assert (env.step_count, env.current_task, env.time_step, env.report()) == (0, None, None, EpisodeReport())
        with pytest.raises(EpisodeStateError, match="reset"):
            await env.step(RESPONSE)
        await env.reset()
        assert (await env.step(RESPONSE)).reward == 1.0
        await env.reset()
        assert [one.closed for one in source.made] == [True, False]
        source.broken = True
        with pytest.raises(RuntimeError, match="broken"):
            await env.reset()
        assert [one.closed for one in source.made] == [True, True, True]
    assert source.calls == ["preflight", "check", "close"]


async def test_concurrent_calls_are_refused_except_close() -> None:
    source = AskingSource()
    env = environment(source)
    await env.reset()
    source.gate.clear()
    stepping = asyncio.create_task(env.step(RESPONSE))
    await asyncio.sleep(0)
    with pytest.raises(EpisodeStateError, match="step\\(\\) is running"):
        await env.reset()
    await env.close()
    assert source.made[0].closed
    source.gate.set()
    await stepping


async def test_close_during_the_checks_starts_no_episode() -> None:
    source, closed = AskingSource(), threading.Event()
    source.check = lambda parts, report: closed.wait(60)  # type: ignore[method-assign, assignment]
    env = environment(source)
    resetting = asyncio.create_task(env.reset())
    await asyncio.sleep(0)
    await env.close()
    closed.set()
    with pytest.raises(EpisodeStateError, match="closed while"):
        await resetting
    assert source.made == []


async def test_missing_backend_is_reported_at_first_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    source = AskingSource(needs_container=True)
    with pytest.raises(PreflightError, match=r"/nowhere/docker\.sock"):
        await environment(source).reset()
    assert source.made == []
    await environment(AskingSource()).reset()
