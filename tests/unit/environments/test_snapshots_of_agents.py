"""Forks of episodes and snapshots, and snapshots of stateful agents."""

import asyncio
import os
import random
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.container_directory import find
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits, TimeLimits
from ares_exp.errors import (
    AgentError,
    ConfigError,
    ContainerStartError,
    DivergenceError,
    SnapshotMismatchError,
    SnapshotUnsupportedError,
)
from ares_exp.llms.response import LLMResponse
from tests.agents.stateful_agent import StatefulAgent, StatefulAgentFactory
from tests.unit.environments.conftest import MakeEnvironment
from tests.unit.environments.snapshots import SUBMIT, Restore, agent_of, ask, last_message, run, running_boxes, say

pytestmark = pytest.mark.local


def directories() -> list[str]:
    """Those of this process's containers."""
    return [one.name for one in find() if one.kind == "directory" and one.whose == f"process {os.getpid()}"]


async def close_all(*environments: CodeEnvironment) -> None:
    await asyncio.gather(*(env.close() for env in environments))


async def test_forks_and_original_are_independent(make_environment: Any) -> None:
    env = make_environment()
    await env.reset()
    await env.step(run("echo shared > /shared"))
    forks = await env.fork(3)
    assert len(directories()) == 4, "one of each container"
    assert [fork.time_step for fork in forks] == [env.time_step] * 3
    await asyncio.gather(*(one.step(run(f"echo {place} >> /shared")) for place, one in enumerate([*forks, env])))
    for place, one in enumerate([*forks, env]):
        await one.step(run("cat /shared"))
        assert f"shared\n{place}\n" in last_message(one)
    await forks[0].step(run("echo 42 > /answer"))
    assert [(await one.step(SUBMIT)).reward for one in [*forks, env]] == [1.0, 0.0, 0.0, 0.0]
    await close_all(*forks)
    assert directories() == []


async def test_forks_outlive_the_original(make_environment: Any) -> None:
    env = make_environment()
    await env.reset()
    [fork] = await env.fork(1)
    await env.close()
    assert (await fork.step(run("echo 42 > /answer"))).mid()
    assert (await fork.step(SUBMIT)).reward == 1.0


async def draws(container: Any, llm: Any) -> None:
    while True:
        await llm(ask(f"{random.random()}"))


async def next_draw(env: CodeEnvironment) -> str:
    await env.step(say("more"))
    return last_message(env)


@pytest.mark.parametrize("diversify", [False, True])
async def test_forked_agents_draw_different_numbers(
    make_environment: Any, restore: Restore, store: Path, diversify: bool
) -> None:
    factory = agent_of(draws)
    env = make_environment(agent=factory)
    await env.reset()
    forks = await env.fork(2, diversify=diversify)
    drawn = [await next_draw(one) for one in (env, *forks)]
    assert len(set(drawn)) == (3 if diversify else 1)
    for place, fork in enumerate(forks):
        again = await restore(await fork.export_state(store, snapshot_id=f"{place}"), code_agent_factory=factory)
        assert last_message(again) == drawn[1 + place]
        assert await next_draw(again) == await next_draw(fork)
    await close_all(*forks)


class FailsOnce(LocalContainerFactory):
    """Its n-th container does not start."""

    fails_at = 0
    made = 0

    def __call__(self, spec: Any) -> Any:
        self.made += 1
        container = super().__call__(spec)
        if self.made == self.fails_at:

            async def start() -> None:
                raise ContainerStartError("no more room")

            container.start = start  # type: ignore[method-assign]
        return container


async def test_failed_fork_closes_all_forks(make_task: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ares_exp.agents.shell_agent import ShellAgentFactory

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    factory, before = FailsOnce(), running_boxes()
    factory.fails_at = 3
    env = CodeEnvironment([make_task()], container_factory=factory, code_agent_factory=ShellAgentFactory())
    async with env:
        await env.reset()
        with pytest.raises(ContainerStartError, match="no more room"):
            await env.fork(3)
        assert len(running_boxes() - before) == 1
        assert not list(tmp_path.glob("*fork*"))
        assert (await env.step(run("echo 42 > /answer"))).mid()
        assert (await env.step(SUBMIT)).reward == 1.0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_nondeterministic_agent_cannot_be_forked(make_environment: Any) -> None:
    made: list[int] = []

    async def counts(container: Any, llm: Any) -> None:
        made.append(1)
        await llm(ask(f"agent {len(made)}"))

    env, before = make_environment(agent=agent_of(counts)), running_boxes()
    await env.reset()
    with pytest.raises(DivergenceError, match=r"agent [23]"):
        await env.fork(2)
    assert len(running_boxes() - before) == 1
    assert (await env.step(say("done"))).last()


@pytest.mark.parametrize("count", [0, -1])
async def test_fork_count_must_be_positive(make_environment: Any, count: int) -> None:
    env = make_environment()
    await env.reset()
    with pytest.raises(ConfigError, match=rf"at least 1 \w+, got {count}"):
        await env.fork(count)


LOOK = LLMResponse.from_text("```bash\npwd\n```")


async def test_nested_forks_share_root_but_not_parent(make_environment: MakeEnvironment) -> None:
    async with AsyncExitStack() as entered:

        async def forked(env: CodeEnvironment, n: int) -> list[CodeEnvironment]:
            return [await entered.enter_async_context(fork) for fork in await env.fork(n)]

        env = make_environment()
        await env.reset()
        forks = await forked(env, 2)
        for fork in forks:
            await fork.step(LOOK)
        below = [one for fork in forks for one in await forked(fork, 1)]

        [first, second] = [fork.lineage for fork in forks]
        assert (first["root"], first["parent"]) == (second["root"], second["parent"])
        assert [fork.lineage["step"] for fork in forks] == [0, 0]
        assert [fork.lineage["branch"] for fork in forks] == [0, 1]
        assert {one.lineage["root"] for one in below} == {first["root"]}
        assert len({first["parent"], *(one.lineage["parent"] for one in below)}) == 3
        assert [one.lineage["step"] for one in below] == [1, 1]


@pytest.fixture
async def echo_port() -> AsyncIterator[int]:
    """A server on the loopback that shouts back."""

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def test_stateful_agent_uses_sockets_and_is_restored(
    make_environment: Any, restore: Restore, store: Path, echo_port: int
) -> None:
    factory = StatefulAgentFactory(echo_port)
    env = make_environment(agent=factory)
    await env.reset()
    await env.step(say("echo 42 > /answer; echo written"))
    assert last_message(env) == "WRITTEN\n"
    assert env.past_steps == ()
    snapshot = await env.export_state(store)
    assert (snapshot.journal, snapshot.agent["state_version"]) == ((), 1)
    again = await restore(snapshot, code_agent_factory=factory)
    assert (again.time_step, again.step_count) == (env.time_step, 1)
    for one in (env, again):
        await one.step(say("cat /answer; echo read"))
        assert last_message(one) == "42\nREAD\n"
        assert (await one.step(say("done"))).reward == 1.0


async def test_agent_without_state_cannot_be_exported(make_environment: Any, store: Path, echo_port: int) -> None:
    async def asks(container: Any, llm: Any) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", echo_port)
        await llm(ask())
        writer.close()
        await writer.wait_closed()

    factory = agent_of(asks)
    factory.deterministic = False
    env = make_environment(agent=factory)
    await env.reset()
    with pytest.raises(SnapshotUnsupportedError, match=r"not deterministic and has no get_state"):
        await env.export_state(store)
    assert not store.exists()
    assert (await env.step(say("done"))).last()


async def test_deterministic_agent_cannot_use_sockets(make_environment: Any, echo_port: int) -> None:
    async def connects(container: Any, llm: Any) -> None:
        await llm(ask())
        await asyncio.open_connection("127.0.0.1", echo_port)

    env = make_environment(agent=agent_of(connects))
    await env.reset()
    with pytest.raises(AgentError, match=r"create_connection.*deterministic = False"):
        await env.step(say("go on"))


class Newer(StatefulAgent):
    state_version = 2


class Picky(StatefulAgent):
    def set_state(self, state: Mapping[str, Any]) -> None:
        raise ValueError("I want more")


class Different(StatefulAgent):
    def set_state(self, state: Mapping[str, Any]) -> None:
        self.messages = [{"role": "user", "content": "something else"}]


class Stateless:
    def __init__(self, container: Any, llm: Any, port: int | None) -> None:
        pass

    async def run(self, task: str) -> None:
        raise AssertionError("it was to go on, not to start")


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        (Newer, SnapshotMismatchError, "version 1 of the agent's state, but .* supports version 2"),
        (Picky, SnapshotMismatchError, "cannot load the state in the snapshot: I want more"),
        (Different, DivergenceError, "request of the restored agent differs from the request"),
        (Stateless, SnapshotMismatchError, r"Stateless has no set_state\(\)"),
    ],
)
async def test_agent_that_rejects_the_state_is_an_error(
    make_environment: Any, restore: Restore, store: Path, kind: type[Any], error: type[Exception], told: str
) -> None:
    class Changed(StatefulAgentFactory):
        def __call__(self, *, container: Any, llm_client: Any) -> Any:
            return kind(container, llm_client, None)

    Changed.__module__, Changed.__qualname__ = StatefulAgentFactory.__module__, StatefulAgentFactory.__qualname__
    env = make_environment(agent=StatefulAgentFactory())
    await env.reset()
    await env.step(say("true"))
    snapshot = await env.export_state(store)
    before = running_boxes()
    with pytest.raises(error, match=told):
        await restore(snapshot, code_agent_factory=Changed())
    assert running_boxes() == before


async def test_episode_limits_apply_to_stateful_agents(make_environment: Any) -> None:
    env = make_environment(agent=StatefulAgentFactory(), limits=EpisodeLimits(time=TimeLimits(agent_timeout_sec=2.0)))
    await env.reset()
    last = await env.step(say("echo 42 > /answer; sleep 60"))
    assert (last.reward, last.discount, env.truncated_by) == (1.0, 1.0, "time")


async def test_close_during_a_step_releases_everything(make_environment: Any) -> None:
    env, before = make_environment(agent=StatefulAgentFactory()), running_boxes()
    await env.reset()
    stepping = asyncio.create_task(env.step(say("sleep 60")))
    await asyncio.sleep(0.1)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    assert running_boxes() == before
    assert asyncio.all_tasks() == {asyncio.current_task()}
