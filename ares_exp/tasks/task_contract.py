"""The `Task` protocol: one problem, in any format, and what its agent gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ares_exp.containers.container import Container, ContainerSpec, Shell, User
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.tasks.environment_section import McpServer


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Parts of a task that its agent gets besides the instruction. The factory of an agent that supports them says so.

    Such a factory has `supports: frozenset[str]` with some of the names below, and its agents have
    `set_context(context)`, called before `run`. A task that needs what the agent does not support is refused.

    Attributes:
        messages: `"messages"`: a conversation that the agent continues, oldest first.
        skills_dir: `"skills_dir"`: a directory of skills in the container.
        mcp_servers: `"mcp_servers"`: tool servers.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    skills_dir: str | None = None
    mcp_servers: tuple[McpServer, ...] = ()

    @property
    def needs(self) -> frozenset[str]:
        """Names of what there is."""
        return frozenset(name for name in ("messages", "skills_dir", "mcp_servers") if getattr(self, name))


@dataclass(frozen=True, slots=True)
class TaskOrigin:
    """The origin of a task's files: a folder of a git repository at one commit.

    Attributes:
        git_url: The repository.
        git_commit: All hexadecimal digits of the commit, also if a branch or a tag was named.
        path: The task's folder in the repository, relative; `.` for the repository itself.
    """

    git_url: str
    git_commit: str
    path: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score by a verifier.

    Attributes:
        reward: The one number that the episode is worth.
        rewards: Everything the verifier scored, by key; `reward` is derived from it.
        note: Why the reward says nothing about the tests, if they could not be run or graded; for people.
    """

    reward: float
    rewards: Mapping[str, float]
    note: str | None = None


class Stage(Protocol):
    """One instruction and its verification. Most tasks have one; a multi-step task has several, in one container.

    Attributes:
        name: Unique within its task; empty for the only one.
        instruction: The agent's instruction.
        agent_timeout_sec: Bound on the whole agent phase in seconds; `None` is unlimited.
        agent_user: User of the agent's commands; `None` is the image's user.
        agent_shell: Shell of the agent's commands; `None` is the one of the container's backend.
        agent_network: Network while the agent runs, and only then.
        start_timeout_sec: Bound on `start` in seconds.
        verifier_timeout_sec: Bound on verification in seconds.
        verifier_network: Network during verification, and only then.
        verifier_spec: The verifier's separate container; `None`: it works in the agent's.
        collect_timeout_sec: Bound on `collect` in seconds. What is not collected by then is left out.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def instruction(self) -> str: ...  # noqa: D102
    @property
    def agent_timeout_sec(self) -> float | None: ...  # noqa: D102
    @property
    def agent_user(self) -> User | None: ...  # noqa: D102
    @property
    def agent_shell(self) -> Shell | None: ...  # noqa: D102
    @property
    def agent_network(self) -> NetworkPolicy: ...  # noqa: D102
    @property
    def start_timeout_sec(self) -> float: ...  # noqa: D102
    @property
    def verifier_timeout_sec(self) -> float: ...  # noqa: D102
    @property
    def verifier_network(self) -> NetworkPolicy: ...  # noqa: D102
    @property
    def verifier_spec(self) -> ContainerSpec | None: ...  # noqa: D102

    @property
    def collect_timeout_sec(self) -> float: ...  # noqa: D102

    async def start(self, container: Container) -> None:
        """Prepares the container for this stage, before its agent.

        Raises:
            ContainerError: The container failed.
        """
        ...

    def solution_env(self) -> Mapping[str, str]:
        """Returns the environment variables that the solution script needs (they may hold secrets: never record them).

        Raises:
            TaskError: A host variable is missing.
        """
        ...

    async def upload_solution(self, container: Container) -> Mapping[str, str]:
        """Puts the solution into the container, ready to run as `/solution/solve.sh`.

        Returns:
            As `solution_env`.

        Raises:
            TaskError: The task has no solution.
            ContainerError: The container failed.
        """
        ...

    async def collect(self, container: Container, target: Path | None) -> None:
        """Takes out of the agent's container what is to be kept, after the agent. What is missing is noted, no error.

        Args:
            container: The agent's container; nothing of the agent's runs any more.
            target: A directory on the host; `None`: nothing is kept.

        Raises:
            ContainerError: The container failed.
        """
        ...

    async def clear(self, container: Container) -> Sequence[str]:
        """Removes what the agent has left in the agent's container where the verifier works in it.

        Returns:
            Directories that are empty now, and that the container's image may have brought: if so, they are put back.

        Raises:
            VerifierError: Processes that should be stopped still run.
            ContainerError: The container failed.
        """
        ...

    async def prepare_verifier(self, container: Container, artifacts: Path) -> None:
        """Gives a container of the verifier's own (`verifier_spec`) what `collect` left in `artifacts`.

        Raises:
            ContainerError: The container failed.
        """
        ...

    async def verify(self, container: Container, output_dir: Path | None) -> Verdict:
        """Scores what the agent left. The caller bounds it by `verifier_timeout_sec`.

        Args:
            container: The verifier's own container, or the agent's.
            output_dir: Where to leave the verifier's own files on the host, or `None`.

        Raises:
            VerifierError: There is no usable reward; the class says why.
            ContainerError: The container failed.
        """
        ...

    def goes_on(self, verdict: Verdict) -> bool:
        """Whether the stage after this one is run."""
        ...


class Task(Protocol):
    """One problem: a container definition, and stages with an instruction and a verifier each.

    Attributes:
        name: Unique within its task set; what selections, records and reports call it.
        container_spec: Specification of the agent's container.
        stages: At least one, run one after the other in the same container, each by a new agent.
        context: Parts of the task that the agent gets besides its instruction.
        set_up_timeout_sec: Bound on `set_up` in seconds.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def container_spec(self) -> ContainerSpec: ...  # noqa: D102
    @property
    def stages(self) -> Sequence[Stage]: ...  # noqa: D102
    @property
    def context(self) -> AgentContext: ...  # noqa: D102
    @property
    def set_up_timeout_sec(self) -> float: ...  # noqa: D102

    async def set_up(self, container: Container) -> None:
        """Prepares a started container (log directories and the like), once.

        Raises:
            ContainerError: The container failed.
        """
        ...

    def reward(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Returns the reward of the episode, from the verdicts on the stages that were run (at least one)."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Returns the JSON-ready identity of the task for records: name, source path, content digest."""
        ...
