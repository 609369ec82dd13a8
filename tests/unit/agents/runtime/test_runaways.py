"""Agents that would stop everything else: they end their own episode."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import pytest

from ares_exp.agents.runtime.journal import Journal
from ares_exp.environments.agent_host import AgentHost
from ares_exp.errors import AgentError
from ares_exp.llms.request import LLMRequest

ASK = LLMRequest([{"role": "user", "content": "?"}])


class Slow:
    """A container whose commands take a moment."""

    async def exec(self, command: str, **_: object) -> None:
        await asyncio.sleep(0.01)


def host_of(run: Any) -> AgentHost:
    class Agent:
        def __init__(self, *, container: Any, llm_client: Any) -> None:
            self.container, self.llm = container, llm_client

        async def run(self, task: str) -> None:
            await run(self.container, self.llm)

    host = AgentHost(Slow(), Journal(0.0, 0))  # type: ignore[arg-type]
    host.start(Agent, "task", timeout_sec=30.0)
    return host


async def test_one_that_polls_without_waiting() -> None:
    async def polls(container: Any, llm: Any) -> None:
        command = asyncio.ensure_future(container.exec("ls"))
        while not command.done():  # noqa: ASYNC110
            await asyncio.sleep(0)

    host = host_of(polls)
    with pytest.raises(AgentError, match="on and on"):
        await host.next_request()
    await asyncio.wait_for(host.cancel(), 30)


async def test_one_that_does_not_take_no_for_a_response() -> None:
    async def insists(container: Any, llm: Any) -> None:
        while True:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await llm(ASK)

    host = host_of(insists)
    assert await host.next_request() == ASK
    await asyncio.wait_for(host.cancel(), 30)


async def test_one_that_waits_for_nothing() -> None:
    async def waits(container: Any, llm: Any) -> None:
        await asyncio.Event().wait()

    host = host_of(waits)
    with pytest.raises(AgentError, match="never comes"):
        await host.next_request()
    await host.cancel()


async def test_one_that_leaves_in_a_thread() -> None:
    async def leaves(container: Any, llm: Any) -> None:
        await asyncio.to_thread(sys.exit, 3)

    host = host_of(leaves)
    with pytest.raises(AgentError, match=r"sys\.exit\(3\)"):
        await host.next_request()
    await host.cancel()


async def test_a_command_that_was_cancelled_by_somebody_else() -> None:
    async def works(container: Any, llm: Any) -> None:
        with pytest.raises(RuntimeError, match="was cancelled"):
            await container.exec("ls")
        await llm(ASK)

    async def cancelled(command: str, **_: object) -> None:
        raise asyncio.CancelledError

    host = host_of(works)
    host._hosted._container.exec = cancelled  # type: ignore[method-assign, assignment]
    assert await asyncio.wait_for(host.next_request(), 30) == ASK
    await host.cancel()
