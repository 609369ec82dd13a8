"""The contract of a recipe: how one program is started, told where its LLM is, and what its end means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.containers.container import ExecResult, Mount
from ares_exp.tasks.task_contract import AgentContext

AGENT_DIR = "/logs/agent"
"""The directory in the container that is kept as `files/<episode>/agent/`; the agent's user may write there."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a recipe is told of one episode. All paths are the container's, and the same in every episode.

    Attributes:
        url: The address of the LLM, such as `http://127.0.0.1:61081`: without `/v1`, and without a slash at the end.
        key: The key to be sent with each request.
        model: The name of the model to be asked for.
        instruction_file: A file with the task's instruction.
        directory: The directory that is kept, there and writable for the agent; `AGENT_DIR`. For session files.
        program: What `AgentRecipe.find_program` found.
        context: What the task gives its agent besides the instruction.
    """

    url: str
    key: str
    model: str
    instruction_file: str
    directory: str = AGENT_DIR
    program: str = ""
    context: AgentContext = field(default_factory=AgentContext)

    @property
    def variables(self) -> dict[str, str]:
        """The variables that every agent's command has, whatever the recipe adds."""
        return {
            "ARES_LLM_URL": self.url,
            "ARES_LLM_KEY": self.key,
            "ARES_MODEL": self.model,
            "ARES_INSTRUCTION_FILE": self.instruction_file,
            "ARES_AGENT_DIR": self.directory,
        }


@dataclass(frozen=True, slots=True)
class LaunchedCommand:
    """The command that is the agent.

    Attributes:
        command: Shell source, run as the agent's user in the container's working directory. Its standard input is the
            instruction. It has `Launch.variables`.
        env: More variables. The key belongs here, and not into `command`, which is recorded.
        files: Text files that are made before, by the agent's user: absolute path → contents.
    """

    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


class AgentRecipe(Protocol):
    """One program. Its methods are called on any number of episodes at the same time.

    Attributes:
        name: As in the option `agent=NAME`.
        version: The pinned version, or `None` where there is none.
        conversation_headers: Names of request headers, lower case, whose values tell the conversations of one run of
            the agent apart. A request without any of them belongs to the main one.
        normalisers: Replacements in compared requests of what differs at every run: name → (pattern, replacement), as
            in `ares_exp.trajectories.request_diff`.
        variables: Names of variables or options that tell the program where its LLM is, for messages.
        supports: Names of what of `AgentContext` it can use.
        offers_tools: Whether all that belongs to its work offers tools to its LLM: a call without is a background
            request.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> str | None: ...  # noqa: D102
    @property
    def conversation_headers(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def normalisers(self) -> Mapping[str, tuple[str, str]]: ...  # noqa: D102
    @property
    def variables(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def supports(self) -> frozenset[str]: ...  # noqa: D102
    @property
    def offers_tools(self) -> bool: ...  # noqa: D102

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Directories of this machine that the container gets, read-only: the program. Known after `preflight`.

        They are the same for every image; which of several builds fits is found out by `find_program`.
        """
        ...

    async def preflight(self) -> None:
        """Has the program ready on this machine, before the first episode.

        Raises:
            PreflightError: With the remedy.
        """
        ...

    async def find_program(self, container: AgentContainer) -> str:
        """Finds the program in this container, and sees that it runs there; empty if there is nothing to be found.

        Raises:
            AgentInstallError: It does not run there; with what is missing.
            ContainerError: The container failed.
        """
        ...

    def command(self, launch: Launch) -> LaunchedCommand:
        """Writes the command of one episode."""
        ...

    def ended(self, result: ExecResult) -> None:
        """Judges the end of the command; `result.output` is the end of what it printed.

        Raises:
            AgentExitError: The end says that the agent failed.
        """
        ...
