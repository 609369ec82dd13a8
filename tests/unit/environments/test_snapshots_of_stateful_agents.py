"""Agents that need the whole event loop: their episodes are as ever, and are exported by a state of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import AgentError, DivergenceError, SnapshotMismatchError, SnapshotUnsupportedError
from ares_exp.tasks.verification.time_limits import TimeLimits
from tests.agents.stateful_agent import ForgetfulAgentFactory, StatefulAgent, StatefulAgentFactory
from tests.unit.environments.snapshots import Restore, agent_of, ask, last_message, running_boxes, say

pytestmark = pytest.mark.local


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


async def test_it_has_sockets_and_its_episode_goes_on_elsewhere(
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


async def test_without_a_state_it_cannot_be_exported(make_environment: Any, store: Path, echo_port: int) -> None:
    async def asks(container: Any, llm: Any) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", echo_port)
        await llm(ask())
        writer.close()
        await writer.wait_closed()

    factory = agent_of(asks)
    factory.deterministic = False
    env = make_environment(agent=factory)
    await env.reset()
    with pytest.raises(SnapshotUnsupportedError, match=r"not deterministic .* and has no get_state"):
        await env.export_state(store)
    assert not store.exists()
    assert (await env.step(say("done"))).last()


async def test_one_that_does_not_say_so_has_no_sockets(make_environment: Any, echo_port: int) -> None:
    async def connects(container: Any, llm: Any) -> None:
        await llm(ask())
        await asyncio.open_connection("127.0.0.1", echo_port)

    env = make_environment(agent=agent_of(connects))
    await env.reset()
    with pytest.raises(AgentError, match=r"create_connection.*deterministic = False"):
        await env.step(say("go on"))


async def refused(
    make_environment: Any, restore: Restore, store: Path, changed: Any, kind: type[Exception], told: str
) -> None:
    env = make_environment(agent=StatefulAgentFactory())
    await env.reset()
    await env.step(say("true"))
    snapshot = await env.export_state(store)
    before = running_boxes()
    with pytest.raises(kind, match=told):
        await restore(snapshot, code_agent_factory=changed(StatefulAgentFactory()))
    assert running_boxes() == before


def with_agents_of(kind: type[Any]) -> Any:
    """Has a factory make other agents, under its own name."""

    def change(factory: StatefulAgentFactory) -> Any:
        class Changed(StatefulAgentFactory):
            def __call__(self, *, container: Any, llm_client: Any) -> Any:
                return kind(container, llm_client, None)

        Changed.__module__, Changed.__qualname__ = StatefulAgentFactory.__module__, StatefulAgentFactory.__qualname__
        return Changed()

    return change


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
        (Newer, SnapshotMismatchError, "a state of version 1 .* takes version 2"),
        (Picky, SnapshotMismatchError, "does not take the state that the snapshot has: I want more"),
        (Different, DivergenceError, "given its state, asks its LLM something else"),
        (Stateless, SnapshotMismatchError, r"Stateless has no set_state\(\)"),
    ],
)
async def test_an_agent_that_does_not_take_the_state(
    make_environment: Any, restore: Restore, store: Path, kind: type[Any], error: type[Exception], told: str
) -> None:
    await refused(make_environment, restore, store, with_agents_of(kind), error, told)


async def test_a_state_that_lacks_something_is_found(make_environment: Any, restore: Restore, store: Path) -> None:
    env = make_environment(agent=ForgetfulAgentFactory())
    await env.reset()
    await env.step(say("true"))
    with pytest.raises(DivergenceError, match="asks its LLM something else"):
        await restore(await env.export_state(store), code_agent_factory=ForgetfulAgentFactory())


async def test_the_limits_of_its_episode_hold(make_environment: Any) -> None:
    env = make_environment(agent=StatefulAgentFactory(), limits=EpisodeLimits(time=TimeLimits(agent_timeout_sec=2.0)))
    await env.reset()
    last = await env.step(say("echo 42 > /answer; sleep 60"))
    assert (last.reward, last.discount, env.truncated_by) == (1.0, 1.0, "time")


async def test_closing_it_in_the_middle_of_a_step_leaves_nothing(make_environment: Any) -> None:
    env, before = make_environment(agent=StatefulAgentFactory()), running_boxes()
    await env.reset()
    stepping = asyncio.create_task(env.step(say("sleep 60")))
    await asyncio.sleep(0.1)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    assert running_boxes() == before
    assert asyncio.all_tasks() == {asyncio.current_task()}
