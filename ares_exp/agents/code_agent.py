"""The contracts of a code agent, ordinary code that awaits an LLM client and works in a container, and its factory."""

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
    """A container as its code agent sees it: a place to work in, which it can neither start nor stop."""

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Runs a command; see `Container.exec`. `user` defaults to the task's agent user."""
        ...

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Copies from the host into the container; see `Container.upload`."""
        ...

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Copies from the container to the host; see `Container.download`."""
        ...


@runtime_checkable
class AgentTerminal(AgentContainer, Protocol):
    """An `AgentContainer` with a terminal, which agents of factories that say `needs_terminal` get."""

    async def use_terminal(self, keys: str, *, seconds: float, columns: int, lines: int) -> TerminalOutput:
        """Types into the terminal, waits, and returns what it printed since the last time.

        It is opened at the first call. Where there is none any more, because its shell has ended, or because the
        episode goes on in another container, a fresh one is opened before: the output says so.

        Args:
            keys: What is typed, as a keyboard sends it: Enter is a carriage return.
            seconds: How long is waited.
            columns: Width of a terminal that is opened.
            lines: Its height.

        Raises:
            ContainerError: It cannot be opened.
        """
        ...


class CodeAgent(Protocol):
    """Works on one task, once."""

    async def run(self, task: str) -> None:
        """Works on the instruction `task` and returns when done. What it raises is an agent error."""
        ...


@runtime_checkable
class ContextualAgent(CodeAgent, Protocol):
    """An agent that can use further parts of a task than the instruction; its factory has `supports`."""

    def set_context(self, context: AgentContext) -> None:
        """Takes it, before `run` or `resume`."""
        ...


@runtime_checkable
class CountingAgent(CodeAgent, Protocol):
    """An agent that counts the replies that were in none of its forms, for the row of its episode.

    Attributes:
        format_errors: Number of them so far.
    """

    format_errors: int


@runtime_checkable
class AccountedAgent(CodeAgent, Protocol):
    """An agent that is a program of its own, for the row of its episode.

    Attributes:
        facts: What came from it so far.
    """

    @property
    def facts(self) -> AgentFacts: ...  # noqa: D102


@runtime_checkable
class StatefulAgent(CodeAgent, Protocol):
    """An agent that can be stopped at an LLM call and continued from its own state, instead of being run again.

    Attributes:
        state_version: Raised whenever the meaning of the state changes.
    """

    state_version: int

    def get_state(self) -> Mapping[str, Any]:
        """Returns the state from which the pending LLM call is made again. JSON-ready."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes over a state. Raises `ValueError` when it is none."""
        ...

    async def resume(self, task: str) -> None:
        """Continues: its first call is the LLM call that it waited for. As `run` from there."""
        ...


class CodeAgentFactory(Protocol):
    """Makes a fresh agent for each episode: the agent's class, a function, or an object with options.

    What else can be asked of a factory, and what is assumed of one that does not have it, is `AgentFactoryBase`.
    """

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> CodeAgent:
        """Makes an agent that works in `container` and asks `llm_client`."""
        ...


class AgentFactoryBase(CodeAgentFactory):
    """Everything that is asked of a factory of code agents. All but calling it has its default here.

    Attributes:
        harmless_options: Names of the constructor's options that a snapshot may bring. A snapshot can come from
            anybody: with any other option set, it is restored only with a factory that the user gives. Default: none.
    """

    harmless_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def name(self) -> str:
        """The agent's name in records. Default: the name of the class without `Factory`, or of the function."""
        return name_of(self).removesuffix("Factory")

    @property
    def options(self) -> Mapping[str, Any]:
        """The constructor's options that snapshots record, JSON-ready, without secrets. Default: none."""
        return {}

    @property
    def supports(self) -> frozenset[str]:
        """Names of what of `AgentContext` its agents, then `ContextualAgent`s, can use. Default: nothing.

        A task that gives its agent more is refused.
        """
        return frozenset()

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Directories of this machine that the container of its agents is started with. Default: none.

        Asked for after `preflight`, and the same for every task: what fits an image is found out in the container. A
        backend that has no place for them refuses the task.
        """
        return ()

    @property
    def normalisers(self) -> Mapping[str, tuple[str, str]]:
        """What of its requests differs whenever it is run again: name → pattern and replacement. Default: nothing.

        Beside the built-in ones of `ares_exp.trajectories.request_diff`, in resumes.
        """
        return {}

    @property
    def files_dir(self) -> str | None:
        """The directory in the container that is kept as `files/<episode>/agent/`. Default: none is."""
        return None

    @property
    def deterministic(self) -> bool:
        """Whether its agents can be run again from a journal, by the rules of `ares_exp.testing.check_agent`.

        Agents that reach for the world past their container and their LLM (sockets, processes, threads) cannot. They
        get the whole event loop, and have snapshots only as `StatefulAgent`s. Default: yes.
        """
        return True

    @property
    def can_be_restored(self) -> bool:
        """Whether an episode of its agents can go on from a snapshot, by a journal or by their state. Default: yes.

        Of others, snapshots have the container's files alone, to look at; and branches run recorded responses again.
        """
        return True

    @property
    def needs_terminal(self) -> bool:
        """Whether its agents use the container's terminal (`AgentTerminal`). Default: no."""
        return False

    @property
    def needs_forwarded_port(self) -> bool:
        """Whether its agents open forwarded ports into the container (`ServingContainer`). Default: no."""
        return False

    @property
    def responds_in_background(self) -> bool:
        """Whether its agents mark calls that are answered without a step (`Origin.is_background`). Default: no."""
        return False

    @property
    def source_digest(self) -> str | None:
        """Digest of the agent's code, in case a snapshot cannot be restored. Default: of the module of the factory."""
        try:
            source = inspect.getsource(inspect.getmodule(kind_of(self)) or object)
        except (OSError, TypeError):
            return None
        return f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"

    def check_snapshots(self) -> None:
        """Checks, before `preflight`, that the state of its agents can be captured. Default: it can be.

        Raises:
            UserError: It cannot be.
        """

    async def preflight(self) -> None:
        """Checks, before the first episode, what its agents need.

        Raises:
            PreflightError: With the remedy.
        """


def as_agent_factory(factory: CodeAgentFactory) -> AgentFactoryBase:
    """Returns `factory` with the defaults of `AgentFactoryBase` for what it lacks."""
    return completed(factory, AgentFactoryBase)


def effective_agent(agents: AgentFactoryBase, *, runs_solutions: bool) -> AgentFactoryBase:
    """Returns who runs: solutions need no program of others, and the shell agent carries them out.

    Args:
        agents: The agent that was chosen.
        runs_solutions: Whether the policy runs the tasks' solutions.
    """
    return _solver() if runs_solutions and agents.needs_forwarded_port else agents


@functools.cache
def _solver() -> AgentFactoryBase:
    from ares_exp.agents.shell_agent import ShellAgentFactory

    return as_agent_factory(ShellAgentFactory())
