"""The `Task` protocol: one problem, in any format, and the context of its agent."""

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
    """Parts of a task that its agent gets in addition to the instruction.

    An agent factory that supports them has `supports: frozenset[str]` with some of the names below. Its agents have
    `set_context(context)`, called before `run`. A task that needs unsupported parts is rejected.

    Attributes:
        messages: `"messages"`: a conversation that the agent continues, oldest message first.
        skills_dir: `"skills_dir"`: a directory of skills in the container.
        mcp_servers: `"mcp_servers"`: tool servers.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    skills_dir: str | None = None
    mcp_servers: tuple[McpServer, ...] = ()

    @property
    def needs(self) -> frozenset[str]:
        """Names of the non-empty parts."""
        return frozenset(name for name in ("messages", "skills_dir", "mcp_servers") if getattr(self, name))


@dataclass(frozen=True, slots=True)
class TaskOrigin:
    """The origin of a task's files: a folder of a git repository at one commit.

    Attributes:
        git_url: The repository.
        git_commit: Full hash of the commit, also if a branch or a tag was named.
        path: The task's folder in the repository, relative; `.` for the repository itself.
    """

    git_url: str
    git_commit: str
    path: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score by a verifier.

    Attributes:
        reward: The one number that is the episode's reward.
        rewards: All numbers of the verifier, by key; `reward` is derived from them.
        note: Why the tests could not be run or graded, as text for people; otherwise empty.
    """

    reward: float
    rewards: Mapping[str, float]
    note: str | None = None


class Stage(Protocol):
    """One instruction and its verification. Most tasks have one; a multi-step task has several, in one container.

    Attributes:
        name: Unique within its task; empty for a single stage.
        instruction: The agent's instruction.
        agent_timeout_sec: Bound on the whole agent phase in seconds; `None` is unlimited.
        agent_user: User of the agent's commands; `None` is the image's user.
        agent_shell: Shell of the agent's commands; `None` is the shell of the container's backend.
        agent_network: Network while the agent runs, and only then.
        start_timeout_sec: Bound on `start` in seconds.
        verifier_timeout_sec: Bound on verification in seconds.
        verifier_network: Network during verification, and only then.
        verifier_spec: The verifier's separate container; `None` if it runs in the agent's container.
        collect_timeout_sec: Bound on `collect` in seconds. Files not collected by then are left out.
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
        """Returns the environment variables of the solution script. They may be secret and are never recorded.

        Raises:
            TaskError: A host variable is missing.
        """
        ...

    async def upload_solution(self, container: Container) -> Mapping[str, str]:
        """Uploads the solution to the container, ready to run as `/solution/solve.sh`.

        Returns:
            The variables that `solution_env` returns.

        Raises:
            TaskError: The task has no solution.
            ContainerError: The container failed.
        """
        ...

    async def collect(self, container: Container, target: Path | None) -> None:
        """Copies the stage's artifacts out of the agent's container, after the agent. Missing ones are only recorded.

        Args:
            container: The agent's container; the agent's processes have ended.
            target: A directory on the host; `None` keeps no files.

        Raises:
            ContainerError: The container failed.
        """
        ...

    async def clear(self, container: Container) -> Sequence[str]:
        """Removes the agent's files from the verifier's directories, if the verifier runs in the agent's container.

        Returns:
            Directories that are now empty and may have had files in the container's image: if so, these are restored.

        Raises:
            VerifierError: Processes that should be stopped still run.
            ContainerError: The container failed.
        """
        ...

    async def prepare_verifier(self, container: Container, artifacts: Path) -> None:
        """Gives the verifier's own container (`verifier_spec`) the files that `collect` left in `artifacts`.

        Raises:
            ContainerError: The container failed.
        """
        ...

    async def verify(self, container: Container, output_dir: Path | None) -> Verdict:
        """Scores the agent's results. The caller bounds the call by `verifier_timeout_sec`.

        Args:
            container: The verifier's own container, or the agent's.
            output_dir: Directory on the host for the verifier's files, or `None`.

        Raises:
            VerifierError: The verifier gave no usable reward. The class of the error identifies the cause.
            ContainerError: The container failed.
        """
        ...

    def goes_on(self, verdict: Verdict) -> bool:
        """Returns whether the next stage is run."""
        ...


class Task(Protocol):
    """One problem: a container definition, and stages with an instruction and a verifier each.

    Attributes:
        name: Name, unique within its task set, used in selections, records and reports.
        container_spec: Specification of the agent's container.
        stages: At least one stage. Stages run one after the other in the same container, each with a new agent.
        context: Parts of the task that the agent gets in addition to its instruction.
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
        """Computes the reward of the episode from the verdicts on its stages (at least one)."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Returns the JSON-ready identity of the task for records: name, source path, content digest."""
        ...
