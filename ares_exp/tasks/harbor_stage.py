"""`HarborStage`, one instruction of a Harbor task with its verification. A multi-step task has one stage per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ares_exp.containers.container import Container, ContainerSpec, Shell, User
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.errors import AddTestsDirError, TaskError, TransferError, VerifierError
from ares_exp.tasks.env_templates import resolve_env, secret_values
from ares_exp.tasks.environment_section import EnvironmentSection
from ares_exp.tasks.task_contract import Verdict
from ares_exp.tasks.task_files import CONTAINER_DEFINITIONS, compose_file, upload_image_files, uploadable
from ares_exp.tasks.task_toml import (
    TASK_TOML,
    AgentSection,
    Artifact,
    CollectHook,
    Step,
    TaskToml,
    VerifierMode,
    VerifierSection,
)
from ares_exp.tasks.verification.collection import COLLECT_TIMEOUT_SEC, collect, deliver_artifacts, hook_limit_sec
from ares_exp.tasks.verification.manifest import with_conventional
from ares_exp.tasks.verification.rewards import reaches
from ares_exp.tasks.verification.root_commands import (
    empty,
    make_log_dirs,
    release_log_dir,
    reserve_log_dir,
    stop_processes,
)
from ares_exp.tasks.verification.step_setup import find_solution, longest_set_up_sec, set_up_step, upload_solution
from ares_exp.tasks.verification.verification import TESTS_DIR, VERIFIER_DIR, verify

AGENT_DIR = "/logs/agent"


@dataclass(frozen=True, eq=False)
class HarborStage:
    """One instruction of a Harbor task. Implements `ares_exp.tasks.task_contract.Stage`.

    Attributes:
        root: Absolute path of the task directory.
        config: Content of task.toml.
        instruction: The agent's instruction, without canary lines.
        step: The entry of `[[steps]]`; `None` if the task has no steps.
        reward_key: Key of the reward in `reward.json`; see `choose_reward`.
        follows_shared: Whether the tests of the previous step were run in the agent's container.
        is_last: Whether this is the last step.
    """

    root: Path
    config: TaskToml
    instruction: str
    step: Step | None = None
    reward_key: str | None = None
    follows_shared: bool = False
    is_last: bool = True

    @property
    def name(self) -> str:
        """Name of the step; empty for a task without steps."""
        return self.step.name if self.step is not None else ""

    @property
    def folder(self) -> Path:
        """Folder of the stage: `steps/<name>`, or the task directory if the task has no steps."""
        return self.root / "steps" / self.step.name if self.step is not None else self.root

    @property
    def _agent(self) -> AgentSection:
        return self.step.agent if self.step is not None else self.config.agent

    @property
    def _verifier(self) -> VerifierSection:
        return self.step.verifier if self.step is not None else self.config.verifier

    @property
    def agent_timeout_sec(self) -> float | None:
        """Time limit of the agent phase in seconds; `None` for no limit."""
        own = self._agent.timeout_sec
        return self.config.agent.timeout_sec if own is None else own

    @property
    def agent_user(self) -> User | None:
        """User of the agent's commands; `None` for the image's user."""
        own = self._agent.user
        return self.config.agent.user if own is None else own

    @property
    def agent_shell(self) -> Shell | None:
        """`None` (the default shell of the container's backend), because the format has no setting for the shell."""
        return None

    @property
    def agent_network(self) -> NetworkPolicy:
        """The network while the agent runs."""
        return self._agent.network or self.config.agent.network or self.config.environment.network

    @property
    def verifier_timeout_sec(self) -> float:
        """Time limit of the verification in seconds. A step ignores the task's limit; the default of a step is 600."""
        return self._verifier.timeout_sec

    @property
    def verifier_user(self) -> User | None:
        """User of the test script; `None` for the image's user."""
        own = self._verifier.user
        return self.config.verifier.user if own is None else own

    @property
    def verifier_network(self) -> NetworkPolicy:
        """The network during verification."""
        base = self._verifier_environment if self.verifier_mode == "separate" else self.config.environment
        return self._verifier.network or self.config.verifier.network or base.network

    @property
    def verifier_mode(self) -> VerifierMode:
        """`shared` if the tests run in the agent's container, otherwise `separate`. A step may override the mode."""
        own = self._verifier
        return own.mode if own.environment_mode or own.environment else self.config.verifier.mode

    @property
    def _verifier_environment(self) -> EnvironmentSection:
        """The table for the verifier's separate container: the step's table, the task's table or `[environment]`."""
        return self._verifier.environment or self.config.verifier.environment or self.config.environment

    @cached_property
    def _verifier_image(self) -> tuple[str | None, Path | None]:
        """Image or build context of the verifier's separate container; both are `None` if it uses the agent's image."""
        for section, tests in ((self._verifier, self.folder / "tests"), (self.config.verifier, self.root / "tests")):
            if section.environment is not None and section.environment.docker_image:
                return section.environment.docker_image, None
            if any((tests / name).exists() for name in CONTAINER_DEFINITIONS):
                return None, tests
        return None, None

    @property
    def brings_tests(self) -> bool:
        """Whether the verifier's separate container has an image that already contains the tests."""
        return self.verifier_mode == "separate" and self._verifier_image != (None, None)

    @property
    def verifier_spec(self) -> ContainerSpec | None:
        """Specification of the verifier's separate container; `None` if the tests run in the agent's container.

        Raises `TaskError` if an environment variable of the host is missing.
        """
        if self.verifier_mode != "separate":
            return None
        table, environment = self._verifier_environment, self.config.environment
        image, context = self._verifier_image
        if not self.brings_tests:
            image, context = environment.docker_image or None, self.root / "environment"
        user = self.verifier_user
        return ContainerSpec(
            name=f"{self.root.name}-verifier",
            docker_image=image,
            context_dir=context if context is not None and context.is_dir() else None,
            compose_file=compose_file(context),
            workdir=table.workdir,
            env=self._resolved("verifier.environment", table.env),
            network=table.network,
            phase_networks=frozenset((self.verifier_network,)) - {table.network},
            cpus=table.cpus,
            memory_mb=table.memory_mb,
            storage_mb=table.storage_mb,
            gpus=table.gpus,
            users=frozenset() if user is None else frozenset((user,)),
            start_timeout_sec=environment.build_timeout_sec,
        )

    def _resolved(self, table: str, env: Mapping[str, str]) -> dict[str, str]:
        return resolve_env(env, where=f"{self.root / TASK_TOML}: [{table}.env]")

    def check_runnable(self, *, needs_solution: bool) -> None:
        """Checks the stage for errors that an episode would otherwise encounter. Does not start anything."""
        self._verifier_env()
        _ = self.verifier_spec  # resolves its variables
        if needs_solution:
            find_solution(self.root, self.folder)
            self.solution_env()

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values of the host variables with sensitive names that the task uses in any step."""
        verifiers = (self.config.verifier, *(step.verifier for step in self.config.steps))
        tables = [one.env for verifier in verifiers for one in (verifier, verifier.environment) if one is not None]
        return secret_values((self.config.environment.env, self.config.solution.env, *tables))

    def _verifier_env(self) -> dict[str, str]:
        shared, own = self.config.verifier.env, self._verifier.env
        return self._resolved("verifier", shared) | self._resolved("steps.verifier" if self.step else "verifier", own)

    def solution_env(self) -> Mapping[str, str]:
        """Returns the environment variables of the solution, which may contain secrets; see `Stage.solution_env`."""
        return {"DEBIAN_FRONTEND": "noninteractive", **self._resolved("solution", self.config.solution.env)}

    async def upload_solution(self, container: Container) -> Mapping[str, str]:
        """Uploads the solution to the container, where `/solution/solve.sh` runs it."""
        await upload_solution(container, self.root, self.folder)
        return self.solution_env()

    @property
    def start_timeout_sec(self) -> float:
        """Time limit of the step's set-up script and health check, in seconds."""
        return longest_set_up_sec(self.folder, self.step.healthcheck) if self.step is not None else 0.0

    async def start(self, container: Container) -> None:
        """Prepares the container for a step: empties log directories, copies the step's files, and runs its set-up."""
        if self.step is None:
            return
        await make_log_dirs(container, AGENT_DIR)
        if self.follows_shared:
            await release_log_dir(container, VERIFIER_DIR)
            await make_log_dirs(container, VERIFIER_DIR)
            await empty(container, TESTS_DIR)
        await set_up_step(container, self.folder, user=self.agent_user, health_check=self.step.healthcheck)

    @property
    def artifacts(self) -> list[Artifact]:
        """Artifacts to collect: `/logs/artifacts`, then the task's artifacts, then the step's artifacts."""
        return with_conventional((*self.config.artifacts, *(self.step.artifacts if self.step is not None else ())))

    @property
    def collect_hooks(self) -> list[CollectHook]:
        """Commands to run after the agent has ended: the task's hooks, then the step's hooks."""
        return [*self.config.verifier.collect, *(self.step.verifier.collect if self.step is not None else ())]

    @property
    def collect_timeout_sec(self) -> float:
        """Time limit in seconds for the hooks and the copying of the artifacts together."""
        return sum(map(hook_limit_sec, self.collect_hooks), start=COLLECT_TIMEOUT_SEC)

    async def collect(self, container: Container, target: Path | None) -> None:
        """Runs the collect hooks, and copies the artifacts into `target` with a `manifest.json`."""
        await collect(
            container,
            target,
            hooks=self.collect_hooks,
            artifacts=self.artifacts,
            secrets=self.secrets,
            stops_main=self.is_last and self.verifier_mode == "separate",
        )

    async def clear(self, container: Container) -> Sequence[str]:
        """Empties `/logs/verifier` and `/tests`. Called before the collect hooks, because hooks may write files there.

        After this call, only the verifier's user and root can write to `/logs/verifier`. If the task sets
        `stop_processes = true` in `[metadata]`, all processes of the agent are stopped first. Returns `/tests` if this
        directory was not empty and the task has no steps.
        """
        if self.config.metadata.get("stop_processes") is True:
            await stop_processes(container)
        await reserve_log_dir(container, VERIFIER_DIR, self.verifier_user)
        had_tests = await empty(container, TESTS_DIR)
        return (TESTS_DIR,) if had_tests and self.step is None else ()

    async def prepare_verifier(self, container: Container, artifacts: Path) -> None:
        """Creates the log directory in the verifier's separate container, and uploads the collected artifacts."""
        await make_log_dirs(container, VERIFIER_DIR)
        if not self.brings_tests:  # the container has the image of the agent's container
            await upload_image_files(container, self.root / "environment", self.config.environment)
        await deliver_artifacts(container, artifacts)

    async def verify(self, container: Container, output_dir: Path | None) -> Verdict:
        """Runs the tests on the agent's results. The caller must enforce a time limit."""
        try:
            env = self._verifier_env()
        except TaskError as error:
            raise VerifierError(str(error)) from None
        return await verify(
            container,
            upload=self.upload_tests,
            env=env,
            user=self.verifier_user,
            output_dir=output_dir,
            reward_key=self.reward_key,
            secrets=self.secrets,
        )

    async def upload_tests(self, container: Container) -> None:
        """Uploads the tests to `/tests` in the container. Step files replace task files with the same path.

        Raises:
            AddTestsDirError: The tests cannot be copied.
            ContainerError: The container failed.
        """
        folders = [] if self.brings_tests else [self.root / "tests", *([self.folder / "tests"] if self.step else [])]
        for folder in [folder for folder in folders if folder.is_dir()] or folders[:1]:
            try:
                async with uploadable(self.root, folder) as copy:
                    await container.upload(copy, TESTS_DIR)
            except (TransferError, TaskError) as error:
                raise AddTestsDirError(f"The tests in {folder} could not be copied to {TESTS_DIR}: {error}") from error

    def goes_on(self, verdict: Verdict) -> bool:
        """Returns whether the verdict reaches the step's `min_reward`, so that the next step runs."""
        return self.step is None or self.step.min_reward is None or reaches(verdict, self.step.min_reward)
