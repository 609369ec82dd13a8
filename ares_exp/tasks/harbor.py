"""`HarborTask`: a task directory in the Harbor format (single-step), and its life in a container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ares_exp.containers.container import Container, ContainerSpec, User
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.errors import ContainerError, ContainerStartError, TaskError, UnsupportedTaskError, VerifierError
from ares_exp.secrets import protect
from ares_exp.tasks.content_digest import content_digest
from ares_exp.tasks.env_templates import resolve_env, secret_values
from ares_exp.tasks.instruction import read_instruction
from ares_exp.tasks.task import Verdict
from ares_exp.tasks.task_features import refusals, warnings_of
from ares_exp.tasks.task_files import CONTAINER_DEFINITIONS, INSTRUCTION, check_files
from ares_exp.tasks.task_toml import TaskToml, read_task_toml
from ares_exp.tasks.verification import verify

TASK_TOML = "task.toml"
LOG_DIRS = "/logs/agent /logs/verifier /logs/artifacts"
SOLUTION_DIR = "/solution"


@dataclass(frozen=True, eq=False)
class HarborTask:
    """One task directory. Implements `ares_exp.tasks.task.Task`.

    Attributes:
        path: The task directory, absolute.
        instruction: What the agent is told, without canary lines.
        config: Its task.toml.
        warnings: What in task.toml is ignored or old; for the user to see.
        reward_key: Which key of `reward.json` is the reward; `None`: `reward`, or else the only key.
    """

    path: Path
    instruction: str
    config: TaskToml
    warnings: tuple[str, ...] = ()
    reward_key: str | None = None

    @property
    def name(self) -> str:
        """The base name of the directory."""
        return self.path.name

    @property
    def agent_timeout_sec(self) -> float | None:
        """Bound on the agent phase in seconds; `None` is unlimited."""
        return self.config.agent.timeout_sec

    @property
    def agent_user(self) -> User | None:
        """Who runs the agent's commands; `None` is the image's user."""
        return self.config.agent.user

    @property
    def verifier_timeout_sec(self) -> float:
        """Bound on verification in seconds."""
        return self.config.verifier.timeout_sec

    @property
    def agent_network(self) -> NetworkPolicy:
        """What may be reached while the agent runs."""
        return self.config.agent.network or self.config.environment.network

    @property
    def verifier_network(self) -> NetworkPolicy:
        """What may be reached during verification."""
        return self.config.verifier.network or self.config.environment.network

    @property
    def container_spec(self) -> ContainerSpec:
        """What the container must be, its variables filled in from the host's environment as it is now.

        Raises:
            TaskError: A host variable that `[environment.env]` refers to is missing.
        """
        environment = self.config.environment
        return ContainerSpec(
            name=self.name,
            docker_image=environment.docker_image or None,
            context_dir=self._environment_dir if self._environment_dir.is_dir() else None,
            workdir=environment.workdir,
            env=self._resolved("environment", environment.env),
            network=environment.network,
            phase_networks=frozenset((self.agent_network, self.verifier_network)) - {environment.network},
            cpus=environment.cpus,
            memory_mb=environment.memory_mb,
            storage_mb=environment.storage_mb,
            gpus=environment.gpus,
            users=frozenset(user for user in (self.config.agent.user, self.config.verifier.user) if user is not None),
            start_timeout_sec=environment.build_timeout_sec,
        )

    @property
    def _environment_dir(self) -> Path:
        return self.path / "environment"

    def _resolved(self, table: str, env: Mapping[str, str]) -> dict[str, str]:
        return resolve_env(env, where=f"{self.path / TASK_TOML}: [{table}.env]")

    @cached_property
    def digest(self) -> str:
        """`sha256:` and the hex digest of the task's content. Reads every file, the first time."""
        return content_digest(self.path)

    def describe(self) -> Mapping[str, Any]:
        """JSON-ready identity of the task for records. Reads every file, the first time."""
        package = self.config.task
        return {
            "format": "harbor",
            "name": self.name,
            "path": str(self.path),
            "digest": self.digest,
            "reward_key": self.reward_key,
            "package": package.name if package else None,
            "package_version": package.version if package else None,
        }

    def check_runnable(self, *, needs_solution: bool = False) -> None:
        """Checks, without starting anything, what would fail in the middle of an episode.

        Args:
            needs_solution: Whether the policy plays the task's own solution.

        Raises:
            UnsupportedTaskError: The task uses features that are not supported, all of them named.
            TaskError: A host variable is missing; or there is no solution, and it is needed.
        """
        unsupported = refusals(self.path, self.config)
        if unsupported:
            raise UnsupportedTaskError(
                f"{self.path}: task {self.name!r} uses what is not supported yet: {', '.join(unsupported)}. "
                f"Leave it out with env.exclude=[{self.name}]."
            )
        self._resolved("environment", self.config.environment.env)
        self._resolved("verifier", self.config.verifier.env)
        protect(self._secrets)
        if needs_solution:
            self._require_solution()
            self._resolved("solution", self.config.solution.env)

    @property
    def _secrets(self) -> tuple[str, ...]:
        """Host values that the task is given by a name that looks sensitive."""
        config = self.config
        return secret_values((config.verifier.env, config.environment.env, config.solution.env))

    def _require_solution(self) -> Path:
        script = self.path / "solution" / "solve.sh"
        if not script.exists():
            raise TaskError(f"{script}: expected the task's solution, found no file. Play it with another policy.")
        return script.parent

    async def set_up(self, container: Container) -> None:
        """Makes the log directories; uploads `environment/` into the working directory of a prebuilt image.

        Raises:
            ContainerError: The container failed.
        """
        await _as_root(container, f"mkdir -p {LOG_DIRS} && chmod 777 {LOG_DIRS}")
        here = await container.exec("pwd", user="root", timeout_sec=60)
        if here.exit_code != 0:  # every command of the agent would fail in the same way
            raise ContainerStartError(f"Task {self.name}: {here.output.strip()}. Make it in the Dockerfile (WORKDIR).")
        if self._brings_files():
            target = self.config.environment.workdir or (here.output.splitlines() or ["/"])[-1]
            await container.upload(self._environment_dir, target)

    def _brings_files(self) -> bool:
        """Whether `environment/` is data for a prebuilt image instead of the definition of one."""
        folder = self._environment_dir
        if not self.config.environment.docker_image or not folder.is_dir():
            return False
        return any(folder.iterdir()) and not any((folder / name).exists() for name in CONTAINER_DEFINITIONS)

    def solution_env(self) -> Mapping[str, str]:
        """The environment variables that the solution needs; they may hold secrets.

        Raises:
            TaskError: A host variable is missing.
        """
        return {"DEBIAN_FRONTEND": "noninteractive", **self._resolved("solution", self.config.solution.env)}

    async def upload_solution(self, container: Container) -> Mapping[str, str]:
        """Puts the solution into the container, ready to run as `/solution/solve.sh`.

        Returns:
            As `solution_env`.

        Raises:
            TaskError: There is no solution, or a host variable is missing.
            ContainerError: The container failed.
        """
        env = self.solution_env()
        await container.upload(self._require_solution(), SOLUTION_DIR)
        await _as_root(container, f"chmod +x {SOLUTION_DIR}/solve.sh")
        return env

    async def verify(self, container: Container, output_dir: Path | None) -> Verdict:
        """Runs the task's tests on what the agent left in `container`. The caller bounds it.

        Args:
            container: The agent's container.
            output_dir: Where to leave the verifier's files on the host, or `None`.

        Raises:
            VerifierError: There is no usable reward; the class says why.
            ContainerError: The container failed.
        """
        verifier = self.config.verifier
        try:
            env = self._resolved("verifier", verifier.env)
        except TaskError as error:
            raise VerifierError(str(error)) from None
        return await verify(
            container,
            tests=self.path / "tests",
            env=env,
            user=verifier.user,
            output_dir=output_dir,
            reward_key=self.reward_key,
            secrets=self._secrets,
        )


async def _as_root(container: Container, command: str) -> None:
    result = await container.exec(command, cwd="/", user="root", timeout_sec=60)
    if result.exit_code != 0:
        raise ContainerError(
            f"Expected `{command}` to succeed as root, got exit code {result.exit_code}: {result.output}"
        )


def load_task(path: str | Path, *, reward_key: str | None = None) -> HarborTask:
    """Loads and validates the task directory `path`.

    Features that are not supported do not fail here but in `HarborTask.check_runnable`.

    Args:
        path: The task directory.
        reward_key: Which key of `reward.json` is the reward, if neither `reward` nor the only one.

    Raises:
        TaskError: The directory is no valid task; the message says what is wrong and where.
    """
    root = Path(path).resolve()
    parsed = read_task_toml(root / TASK_TOML)
    check_files(root, parsed.config)
    return HarborTask(
        path=root,
        instruction="" if parsed.config.steps else read_instruction(root / INSTRUCTION),
        config=parsed.config,
        warnings=tuple(f"{root.name}: {TASK_TOML}: {warning}" for warning in warnings_of(parsed)),
        reward_key=reward_key,
    )
