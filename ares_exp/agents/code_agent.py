"""The `CodeAgent` protocol: ordinary code that awaits an LLM client and works in a container."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ares_exp.containers.container import MAX_OUTPUT_BYTES, ExecResult, User
from ares_exp.llms.request import LLMClient


class AgentContainer(Protocol):
    """What a code agent sees of its container: it may work in it, but neither start nor stop it."""

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        timeout_sec: float | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
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
    """Makes a fresh agent for each episode."""

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> CodeAgent:
        """An agent that works in `container` and asks `llm_client`."""
        ...
