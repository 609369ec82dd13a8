"""The `CodeAgent` protocol: ordinary code that awaits an LLM client and works in a container."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, Unpack

from ares_exp.containers.container import ExecOptions, ExecResult
from ares_exp.llms.request import LLMClient


class AgentContainer(Protocol):
    """What a code agent sees of its container: it may work in it, but neither start nor stop it."""

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Runs a command; see `Container.exec`. `user` defaults to the task's agent user."""
        ...

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Copies from the host into the container; see `Container.upload`."""
        ...

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Copies from the container to the host; see `Container.download`."""
        ...


class CodeAgent(Protocol):
    """Works on one task, once."""

    async def run(self, task: str) -> None:
        """Works on the instruction `task` and returns when done. What it raises is an agent error."""
        ...


class CodeAgentFactory(Protocol):
    """Makes a fresh agent for each episode. Its `async preflight()`, if it has one, is called before the first."""

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> CodeAgent:
        """An agent that works in `container` and asks `llm_client`."""
        ...
