"""Code agents that need the whole event loop, and give their state instead of being run again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.llms.request import LLMClient, LLMRequest


class StatefulAgentFactory:
    """Makes stateful agents.

    Attributes:
        deterministic: They are not.
        port: Port of an echo server; `None` disables the connection.
    """

    deterministic = False

    def __init__(self, port: int | None = None) -> None:
        self.port = port

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> StatefulAgent:
        """A fresh agent."""
        return StatefulAgent(container, llm_client, self.port)


class StatefulAgent:
    """Runs the LLM's commands and returns their output, processed by a server, until the LLM replies `done`."""

    state_version = 1

    def __init__(self, container: AgentContainer, llm_client: LLMClient, port: int | None) -> None:
        self._container, self._llm, self._port = container, llm_client, port
        self.messages: list[dict[str, Any]] = []

    async def run(self, task: str) -> None:
        """Starts."""
        self.messages.append({"role": "user", "content": task})
        await self.resume(task)

    async def resume(self, task: str) -> None:
        """Sends a request, then continues."""
        while (command := (await self._llm(LLMRequest(self.messages))).text) != "done":
            output = (await self._container.exec(command)).output
            self.messages.append({"role": "user", "content": await self._echo(output)})

    async def _echo(self, text: str) -> str:
        if self._port is None:
            return text
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(text.encode())
            writer.write_eof()
            return (await reader.read()).decode()
        finally:
            writer.close()
            await writer.wait_closed()

    def get_state(self) -> Mapping[str, Any]:
        """All that it knows."""
        return {"messages": self.messages}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes it over."""
        if not isinstance(state.get("messages"), list):
            raise ValueError("expected messages")
        self.messages = state["messages"]


class ForgetfulAgentFactory(StatefulAgentFactory):
    """Makes agents whose state lacks something."""

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> StatefulAgent:
        """A fresh agent."""
        return _ForgetfulAgent(container, llm_client, self.port)


class _ForgetfulAgent(StatefulAgent):
    def get_state(self) -> Mapping[str, Any]:
        return {"messages": self.messages[:1]}
