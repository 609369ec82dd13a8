"""The interfaces that code agents and their factories implement.

A code agent is ordinary asynchronous Python code that awaits LLM responses and runs commands in a container.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Unpack, runtime_checkable

from ares_exp.config.parts import completed, kind_of, name_of
from ares_exp.containers.container import ExecOptions, ExecResult, Mount, TerminalOutput
from ares_exp.llms.request import LLMClient
from ares_exp.records.results import AgentFacts
from ares_exp.tasks.task_contract import AgentContext


class AgentContainer(Protocol):
    """A code agent's view of its container. The agent works in the container, but cannot start or stop it."""

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Runs a command; see `Container.exec`. `user` defaults to the task's agent user."""

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Copies a file or directory from the host into the container; see `Container.upload`."""

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Copies a file or directory from the container to the host; see `Container.download`."""


@runtime_checkable
class AgentTerminal(AgentContainer, Protocol):
    """An `AgentContainer` with a terminal, for agents whose factory sets `needs_terminal`."""

    async def use_terminal(self, keys: str, *, seconds: float, columns: int, lines: int) -> TerminalOutput:
        """Types into the terminal, waits, and returns the output since the previous call.

        The first call opens the terminal. A later call opens a new terminal if the shell in the old terminal has ended,
        or if the episode continues in another container. The output of a call that opens a terminal has `is_new=True`.

        Args:
            keys: Characters to type, as a keyboard sends them: Enter is a carriage return.
            seconds: Time to wait after typing.
            columns: Width of a newly opened terminal.
            lines: Height of a newly opened terminal.

        Raises:
            ContainerError: The terminal cannot be opened.
        """


class CodeAgent(Protocol):
    """An agent that works on one task. Each instance is used once."""

    async def run(self, task: str) -> None:
        """Works on the instruction `task` and returns when done.

        An exception ends the episode with an agent error. `RepeatedFormatError` instead truncates the episode.
        """


@runtime_checkable
class ContextualAgent(CodeAgent, Protocol):
    """An agent that supports skills, MCP servers or messages of a task, as listed in its factory's `supports`."""

    def set_context(self, context: AgentContext) -> None:
        """Receives the task's skills, MCP servers and messages. It is called before `run` or `resume`."""


@runtime_checkable
class CountingAgent(CodeAgent, Protocol):
    """An agent that counts its LLM's malformed replies in `format_errors`, for the episode's results row."""

    format_errors: int


@runtime_checkable
class AccountedAgent(CodeAgent, Protocol):
    """An agent that runs a separate program, and reports `facts` about it for the episode's results row."""

    @property
    def facts(self) -> AgentFacts: ...  # noqa: D102


@runtime_checkable
class StatefulAgent(CodeAgent, Protocol):
    """An agent that can be stopped at an LLM call and later resumed from a saved state, without replaying its calls.

    Attributes:
        state_version: Version of the format of the state. Increase it whenever the meaning of the state changes.
    """

    state_version: int

    def get_state(self) -> Mapping[str, Any]:
        """Returns the agent's state as JSON-ready data. It must suffice to repeat the LLM call that is now pending."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned. Raises `ValueError` if the state is invalid."""

    async def resume(self, task: str) -> None:
        """Continues the task from the restored state. The agent's first LLM call repeats the pending call."""


class CodeAgentFactory(Protocol):
    """Creates a new agent for each episode. It can be the agent's class, a function, or an object with options.

    `AgentFactoryBase` lists the optional members of a factory and their defaults.
    """

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> CodeAgent:
        """Creates an agent that works in `container` and sends its requests to `llm_client`."""


class AgentFactoryBase(CodeAgentFactory):
    """The complete interface of a code agent factory. Every member except `__call__` has a default.

    Attributes:
        harmless_options: Names of the constructor options that a restored snapshot may set, even if it comes from an
            untrusted source. To restore a snapshot with other options, users pass their own factory. Default: none.
    """

    harmless_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def name(self) -> str:
        """Name of the agent in records. Default: the class name without `Factory`, or the function name."""
        return name_of(self).removesuffix("Factory")

    @property
    def version(self) -> str | None:
        """Version of the agent's program in records. Known after `preflight`. Default: `None` (no fixed version)."""
        return None

    @property
    def options(self) -> Mapping[str, Any]:
        """Constructor options to record in snapshots, JSON-ready and without secrets. Default: none."""
        return {}

    @property
    def supports(self) -> frozenset[str]:
        """Names of the attributes of `AgentContext` that the agents support, such as `skills_dir`. Default: none.

        If the set is not empty, the agents have to be `ContextualAgent`s. Tasks that set an unsupported attribute are
        rejected.
        """
        return frozenset()

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Host directories to mount into the agent's container. Default: none.

        The property is read after `preflight`, and all tasks get the same mounts. If different images need different
        files, mount all of them, and let the agent choose in the container. Backends that cannot mount directories
        reject the task.
        """
        return ()

    @property
    def normalisers(self) -> Mapping[str, tuple[str, str]]:
        """Patterns for the parts of requests that differ in every run: name → (pattern, replacement). Default: none.

        When a resumed episode compares its requests with the recorded requests, it ignores differences that match these
        patterns or the built-in patterns of `ares_exp.trajectories.request_diff`.
        """
        return {}

    @property
    def files_dir(self) -> str | None:
        """Directory in the container, for example with logs, to copy to `files/<episode>/agent/`. Default: none."""
        return None

    @property
    def deterministic(self) -> bool:
        """Whether an agent makes the same calls again if it gets the recorded results from a journal. Default: yes.

        Return `False` for agents that use anything except their container and LLM, such as sockets or processes. They
        run on an ordinary event loop, and support snapshots only as `StatefulAgent`s. `ares_exp.testing.check_agent`
        lists the rules for deterministic agents.
        """
        return True

    @property
    def can_be_restored(self) -> bool:
        """Whether an episode can continue from a snapshot. Default: yes.

        To continue, an agent has to be deterministic or a `StatefulAgent`. Otherwise, a snapshot contains only the
        files of the container, for inspection. A branch then starts a new episode and replays the recorded responses.
        """
        return True

    @property
    def needs_terminal(self) -> bool:
        """Whether the agents use the container's terminal (`AgentTerminal`). Default: no."""
        return False

    @property
    def needs_forwarded_port(self) -> bool:
        """Whether the agents open forwarded ports into the container (`ServingContainer`). Default: no."""
        return False

    @property
    def responds_in_background(self) -> bool:
        """Whether the agents set `Origin.is_background` in some requests, such as requests for titles. Default: no.

        The policy responds to such a request without a step of the episode.
        """
        return False

    @property
    def source_digest(self) -> str | None:
        """Digest of the agent's code, recorded in snapshots. Default: digest of the factory's Python file.

        The error message for a snapshot that cannot be restored mentions whether the digest has changed.
        """
        try:
            source = inspect.getsource(inspect.getmodule(kind_of(self)) or object)
        except (OSError, TypeError):
            return None
        return f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"

    def check_snapshots(self) -> None:
        """Checks that the agents support snapshots. It is called before `preflight`. Default: no check.

        Raises:
            UserError: The state of the agents cannot be captured.
        """

    async def preflight(self) -> None:
        """Checks the requirements of the agents before the first episode.

        Raises:
            PreflightError: A requirement is not met. The message suggests a fix.
        """


def as_agent_factory(factory: CodeAgentFactory) -> AgentFactoryBase:
    """Returns `factory` with all members of `AgentFactoryBase`. Missing members get their defaults."""
    return completed(factory, AgentFactoryBase)


def effective_agent(agents: AgentFactoryBase, *, runs_solutions: bool) -> AgentFactoryBase:
    """Returns the agent factory to use: `agents`, or the factory of the shell agent.

    A policy that runs reference solutions (`runs_solutions`) writes replies for bundled agents, not for third-party
    agents. With such a policy, the shell agent replaces a third-party agent.
    """
    return _solver() if runs_solutions and agents.needs_forwarded_port else agents


@functools.cache
def _solver() -> AgentFactoryBase:
    from ares_exp.agents.shell_agent import ShellAgentFactory

    return as_agent_factory(ShellAgentFactory())
