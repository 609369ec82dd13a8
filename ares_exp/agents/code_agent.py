"""The `CodeAgent` protocol: ordinary code that awaits an LLM client and works in a container."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Unpack, runtime_checkable

from ares_exp.containers.container import ExecOptions, ExecResult
from ares_exp.llms.request import LLMClient
from ares_exp.tasks.agent_context import AgentContext


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


@runtime_checkable
class ContextualAgent(CodeAgent, Protocol):
    """An agent that can use what a task gives it besides its instruction; its factory has `supports`."""

    def set_context(self, context: AgentContext) -> None:
        """Takes it, before `run` or `resume`."""
        ...


@runtime_checkable
class StatefulAgent(CodeAgent, Protocol):
    """An agent that can be stopped at an LLM call and go on from a state of its own, instead of being run again.

    Attributes:
        state_version: Raised whenever the meaning of the state changes.
    """

    state_version: int

    def get_state(self) -> Mapping[str, Any]:
        """What it takes to come to the LLM call that it waits for. JSON-ready."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes over a state. Raises `ValueError` when it is none."""
        ...

    async def resume(self, task: str) -> None:
        """Goes on: its first call is the LLM call that it waited for. As `run` from there."""
        ...


class CodeAgentFactory(Protocol):
    """Makes a fresh agent for each episode. What it may have besides is optional.

    `async preflight()` is called before the first episode. `deterministic = False` says that its agents reach for the
    world past their container and their LLM (sockets, processes, threads): they get the whole event loop, and their
    episodes cannot be run again from a journal. What all others have to keep to is told, and checked, by
    `ares_exp.agents.conformance`. `options`, JSON-ready, are what it was made with, for the records.
    """

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> CodeAgent:
        """An agent that works in `container` and asks `llm_client`."""
        ...
