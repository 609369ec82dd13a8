"""Contract of a recipe, which starts one program, configures its LLM endpoint and interprets its exit code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.containers.container import ExecResult, Mount
from ares_exp.tasks.task_contract import AgentContext

AGENT_DIR = "/logs/agent"
"""Directory in the container that is saved as `files/<episode>/agent/`. The agent's user can write to it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Parameters of one episode for a recipe. All paths are paths in the container, and are the same in every episode.

    Attributes:
        url: URL of the LLM, such as `http://127.0.0.1:61081`, without `/v1` and without a trailing slash.
        key: API key to send with each request.
        model: Model name to send in requests.
        instruction_file: Path of the file with the task's instruction.
        directory: Directory for session files, `AGENT_DIR`. It exists, the agent can write to it, and it is saved.
        program: Result of `AgentRecipe.find_program`.
        context: Parts of the task for the agent in addition to the instruction.
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
        """Environment variables of every agent's command. The recipe may add others."""
        return {
            "ARES_LLM_URL": self.url,
            "ARES_LLM_KEY": self.key,
            "ARES_MODEL": self.model,
            "ARES_INSTRUCTION_FILE": self.instruction_file,
            "ARES_AGENT_DIR": self.directory,
        }


@dataclass(frozen=True, slots=True)
class LaunchedCommand:
    """The command that starts the agent.

    Attributes:
        command: Shell source, run as the agent's user in the container's working directory. Its standard input is the
            instruction, and its environment includes `Launch.variables`.
        env: Additional environment variables. Put the key here and not into `command`, which is recorded.
        files: Text files to create before the start, as the agent's user: absolute path → contents.
    """

    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


class AgentRecipe(Protocol):
    """A recipe for one program. Its methods may be called for several episodes at the same time.

    Attributes:
        name: Name in the option `agent=NAME`.
        version: Pinned version, or `None` if it is not pinned.
        conversation_headers: Lower-case names of request headers whose values identify the conversations of one agent
            run. A request without these headers belongs to the main conversation.
        normalisers: Patterns for the parts of requests that differ in every run: name → (pattern, replacement), as in
            `ares_exp.trajectories.request_diff`.
        variables: Names of the variables or options that set the program's LLM, for messages.
        supports: Names of the supported parts of `AgentContext`.
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
    def mounts(self) -> tuple[Mount, ...]:
        """Host directories with the program, mounted read-only into the container. Known after `preflight`.

        They are the same for every image. `find_program` selects the build that fits the container.
        """
        ...

    async def preflight(self) -> None:
        """Prepares the program on this machine, before the first episode.

        Raises:
            PreflightError: The program cannot be prepared. The message suggests a fix.
        """
        ...

    async def find_program(self, container: AgentContainer) -> str:
        """Finds the program in this container and checks that it runs there.

        Returns an empty string if no program is needed.

        Raises:
            AgentInstallError: The program does not run in the container. The message names the missing part.
            ContainerError: The container failed.
        """
        ...

    def command(self, launch: Launch) -> LaunchedCommand:
        """Returns the command of one episode."""
        ...

    def ended(self, result: ExecResult) -> None:
        """Checks the exit of the command. `result.output` is the end of its output.

        Raises:
            AgentExitError: The exit code means that the agent failed.
        """
        ...
