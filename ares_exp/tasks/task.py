"""The `Task` protocol: one problem, whatever format it was written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ares_exp.containers.container import Container, ContainerSpec, User
from ares_exp.containers.network_policy import NetworkPolicy


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier said.

    Attributes:
        reward: The one number that the episode is worth.
        rewards: Everything the verifier scored, by key; `reward` is derived from it.
    """

    reward: float
    rewards: Mapping[str, float]


class Task(Protocol):
    """One problem: an instruction, a container definition, a verifier and, optionally, a solution.

    Attributes:
        name: Unique within its task set; what selections, records and reports call it.
        instruction: What the agent is told.
        container_spec: What the agent's container must be.
        agent_timeout_sec: Bound on the whole agent phase in seconds; `None` is unlimited.
        agent_user: Who runs the agent's commands; `None` is the image's user.
        verifier_timeout_sec: Bound on verification in seconds.
        agent_network: What may be reached while the agent runs, and only then.
        verifier_network: What may be reached during verification, and only then.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def instruction(self) -> str: ...  # noqa: D102
    @property
    def container_spec(self) -> ContainerSpec: ...  # noqa: D102
    @property
    def agent_timeout_sec(self) -> float | None: ...  # noqa: D102
    @property
    def agent_user(self) -> User | None: ...  # noqa: D102
    @property
    def verifier_timeout_sec(self) -> float: ...  # noqa: D102
    @property
    def agent_network(self) -> NetworkPolicy: ...  # noqa: D102
    @property
    def verifier_network(self) -> NetworkPolicy: ...  # noqa: D102

    async def set_up(self, container: Container) -> None:
        """Prepares a started container for the agent (log directories and the like).

        Raises:
            ContainerError: The container failed.
        """
        ...

    def solution_env(self) -> Mapping[str, str]:
        """The environment variables that the solution script needs (they may hold secrets: never record them).

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

    async def verify(self, container: Container, output_dir: Path | None) -> Verdict:
        """Scores what the agent left in `container`. The caller bounds it by `verifier_timeout_sec`.

        Args:
            container: The agent's container; nothing of the agent's runs any more.
            output_dir: Where to leave the verifier's own files on the host, or `None`.

        Raises:
            VerifierError: There is no usable reward; the class says why.
            ContainerError: The container failed.
        """
        ...

    def describe(self) -> Mapping[str, Any]:
        """JSON-ready identity of the task for records: name, source path, content digest."""
        ...
