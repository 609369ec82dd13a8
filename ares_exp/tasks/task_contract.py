"""The protocol `Task`, which describes one problem in any task format, and the types that it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ares_exp.containers.container import Container, ContainerSpec, Shell, User
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.tasks.task_toml import McpServer


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Parts of a task that its agent gets in addition to the instruction.

    An agent factory lists the parts that its agents support in the attribute `supports: frozenset[str]`. These agents
    have `set_context(context)`, which is called before `run`. A task that needs other parts is rejected.

    Attributes:
        messages: A conversation that the agent continues, oldest message first.
        skills_dir: A directory in the container with skills (instructions for the agent).
        mcp_servers: MCP servers whose tools the agent may use.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    skills_dir: str | None = None
    mcp_servers: tuple[McpServer, ...] = ()

    @property
    def needs(self) -> frozenset[str]:
        """Names of the non-empty parts, which the agent must support."""
        return frozenset(name for name in ("messages", "skills_dir", "mcp_servers") if getattr(self, name))


@dataclass(frozen=True, slots=True)
class TaskOrigin:
    """The origin of a task's files: a folder of a git repository at one commit.

    Attributes:
        git_url: URL of the repository.
        git_commit: Full hash of the commit, even if the user named a branch or a tag.
        path: Relative path of the task's folder in the repository; `.` for the repository itself.
    """

    git_url: str
    git_commit: str
    path: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verifier.

    Attributes:
        reward: The number that becomes the reward of the stage or the episode.
        rewards: All numbers from the verifier, by key. `reward` is one of them.
        note: Reason why the tests could not be run or graded; otherwise `None`.
    """

    reward: float
    rewards: Mapping[str, float]
    note: str | None = None


class Stage(Protocol):
    """One instruction for an agent, and the tests of its result.

    Most tasks have one stage. A task with several steps has one stage per step, and a new agent for each.

    Attributes:
        name: Name of the stage, unique within its task; empty for a single stage.
        instruction: The agent's instruction.
        agent_timeout_sec: Time limit of the whole agent phase in seconds; `None` for no limit.
        agent_user: User of the agent's commands; `None` for the image's user.
        agent_shell: Shell of the agent's commands; `None` for the shell of the container's backend.
        agent_network: Network of the container while the agent runs.
        start_timeout_sec: Time limit of `start` in seconds.
        verifier_timeout_sec: Time limit of the verification in seconds.
        verifier_network: Network of the container during verification.
        verifier_spec: Specification of the verifier's separate container; `None` if the verifier runs in the agent's
            container.
        collect_timeout_sec: Time limit of `collect` in seconds. Files that were not copied by then are not collected.
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
        """Prepares the container for this stage, before its agent starts. Raises `ContainerError` if this fails."""

    def solution_env(self) -> Mapping[str, str]:
        """Returns the environment variables of the solution script. Their values may be secret and are never recorded.

        Raises:
            TaskError: A required environment variable of the host is missing.
        """

    async def upload_solution(self, container: Container) -> Mapping[str, str]:
        """Uploads the stage's reference solution to `/solution` in the container, and returns its `solution_env`.

        The policy `oracle` then makes the agent run `/solution/solve.sh`.

        Raises:
            TaskError: The task has no solution.
            ContainerError: The container failed.
        """

    async def collect(self, container: Container, target: Path | None) -> None:
        """Copies the stage's artifacts, which are files to keep, from the agent's container to the host.

        A missing artifact is not an error, but is recorded.

        Args:
            container: The agent's container, in which the agent's processes have ended.
            target: Directory on the host for the artifacts; `None` saves no files.

        Raises:
            ContainerError: The container failed.
        """

    async def clear(self, container: Container) -> Sequence[str]:
        """Empties the verifier's directories in the agent's container, so that the agent cannot fake a result there.

        Called only if the verifier runs in the agent's container.

        Returns:
            The emptied directories. The caller must restore the files that the image contains in them.

        Raises:
            VerifierError: Processes of the agent could not be stopped.
            ContainerError: The container failed.
        """

    async def prepare_verifier(self, container: Container, artifacts: Path) -> None:
        """Copies the artifacts that `collect` saved in `artifacts` to the verifier's separate container.

        Raises:
            ContainerError: The container failed.
        """

    async def verify(self, container: Container, output_dir: Path | None) -> Verdict:
        """Scores the agent's results. The caller enforces `verifier_timeout_sec`.

        Args:
            container: The verifier's separate container, or the agent's container.
            output_dir: Directory on the host for the verifier's files, or `None`.

        Raises:
            VerifierError: The verifier wrote no usable reward. The class of the error identifies the cause.
            ContainerError: The container failed.
        """

    def goes_on(self, verdict: Verdict) -> bool:
        """Returns whether the next stage runs after this verdict on the stage."""


class Task(Protocol):
    """One problem, with a container definition and at least one stage.

    Attributes:
        name: Name of the task in selections, records and reports, unique within its task set.
        container_spec: Specification of the agent's container.
        stages: One or more stages, which run one after the other in the same container. Each stage has a new agent.
        context: Parts of the task that the agent gets in addition to its instruction.
        set_up_timeout_sec: Time limit of `set_up` in seconds.
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
        """Prepares a started container, for example by making log directories. Called once per container.

        Raises:
            ContainerError: The container failed.
        """

    def reward(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Computes the verdict on the episode from at least one verdict on its stages."""

    def describe(self) -> Mapping[str, Any]:
        """Returns the name, source path and content digest of the task, as JSON-ready data for records."""
