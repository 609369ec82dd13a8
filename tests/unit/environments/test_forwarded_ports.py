"""Forwarded ports as an agent opens them in its container."""

from __future__ import annotations

from typing import Any

import pytest

from ares_exp.agents.runtime.agent_runtime import AgentRuntime
from ares_exp.containers.activity import Activity
from ares_exp.environments.hosted_container import HostedContainer
from ares_exp.errors import AgentError, PortForwardingError
from ares_exp.testing.echo_container import RehearsalContainer
from ares_exp.testing.forwarded_port_contract import ForwardedPortContract, Server, echo, greet
from tests.unit.environments.snapshots import agent_of, ask, say

pytestmark = pytest.mark.local


async def opens(container: Any, llm: Any) -> None:
    """Says what comes back by a forwarded port, which is no command."""
    async with ForwardedPortContract().opened(container) as (port, _):
        result = await container.exec(greet(port))
    await llm(ask(result.output))


async def test_an_agent_opens_a_forwarded_port(make_environment: Any) -> None:
    factory = agent_of(opens)
    factory.deterministic = False
    env = make_environment(agent=factory)
    first = await env.reset()
    assert first.observation.messages[0]["content"] == "hello\n"
    assert (await env.step(say("done"))).last()


async def test_one_that_is_run_again_cannot(make_environment: Any) -> None:
    with pytest.raises(AgentError, match=r"not in the journal.*deterministic = False"):
        await make_environment(agent=agent_of(opens)).reset()


async def test_a_container_that_has_none() -> None:
    runtime = AgentRuntime(None, on_llm=lambda _: None, on_change=lambda: None)
    plain: Any = RehearsalContainer()
    hosted = HostedContainer(plain, runtime, user=None, shell=None, env={}, limit_commands=True, activity=Activity())
    with pytest.raises(PortForwardingError, match=r"RehearsalContainer.*Use container=local"):
        await hosted.forward_port(Server(echo))
