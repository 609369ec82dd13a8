"""`HarborTask`, a task that is read from a directory in the Harbor format. It has one `HarborStage` per step.

The templates `${NAME}` and `${NAME:-default}` in `env` tables of task.toml stand for environment variables of the host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ares_exp.containers.container import Container, ContainerSpec, Shell, User
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.errors import (
    AddTestsDirError,
    ContainerStartError,
    TaskError,
    TransferError,
    UnsupportedTaskError,
    VerifierError,
)
from ares_exp.records.secrets import is_sensitive, protect
from ares_exp.tasks.task_contract import AgentContext, TaskOrigin, Verdict
from ares_exp.tasks.task_files import (
    COMPOSE,
    CONTAINER_DEFINITIONS,
    INSTRUCTION,
    TRAJECTORY,
    UploadFilter,
    check_definition_links,
    check_links,
    compose_file,
    content_digest,
    read_instruction,
    read_prior_context,
    require_uploaded,
    upload_image_files,
    uploadable,
)
from ares_exp.tasks.task_toml import (
    MAIN_SERVICE,
    TASK_TOML,
    AgentSection,
    Artifact,
    CollectHook,
    EnvironmentSection,
    Step,
    TaskToml,
    VerifierMode,
    VerifierSection,
    read_task_toml,
    refusals,
    warnings_of,
)
from ares_exp.tasks.verification.collection import (
    COLLECT_TIMEOUT_SEC,
    collect,
    deliver_artifacts,
    hook_limit_sec,
    with_conventional,
)
from ares_exp.tasks.verification.link_bounds import LinkBounds
from ares_exp.tasks.verification.root_commands import (
    PLAIN_SHELL,
    as_root,
    empty,
    make_log_dirs,
    release_log_dir,
    reserve_log_dir,
    stop_processes,
)
from ares_exp.tasks.verification.step_setup import (
    SOLUTION_DIR,
    await_health,
    find_solution,
    longest_sec,
    longest_set_up_sec,
    set_up_step,
    upload_solution,
)
from ares_exp.tasks.verification.verification import TESTS_DIR, VERIFIER_DIR, overall_verdict, reaches, verify

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MIN_SECRET_LENGTH = 8


def resolve_env(table: Mapping[str, str], *, where: str, host: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns an `env` table in which each template is replaced by the value of the host's environment variable.

    A variable with an empty value counts as set, so the default of the template is not used. `where` is the name of the
    table in messages, such as `task.toml: [verifier.env]`.

    Raises:
        TaskError: A variable without a default is not set on the host, or the table contains an invalid name or value.
    """
    resolved = {}
    for key, value in table.items():
        if not _NAME.fullmatch(key) or "\0" in value:
            raise TaskError(f"{where} {key!r}: expected a variable name (letters, digits, _) and a value without NUL.")
        name, default = match.groups() if (match := _TEMPLATE.fullmatch(value)) else ("", value)
        if (found := host.get(name, default)) is None:
            raise TaskError(
                f"{where} {key}: the host variable {name!r} is not set. Set the variable before the run, or add "
                f"a default to the template: ${{{name}:-…}}."
            )
        resolved[key] = found
    return resolved


def secret_values(tables: Iterable[Mapping[str, str]], *, host: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the secrets in `tables`, longest first, so that a secret is masked before any secret that it contains.

    A secret is the value of a host variable that a template uses, if the key or the variable has a sensitive name such
    as `API_KEY`. Values with fewer than 8 characters are omitted, because other texts may contain them by chance.
    """
    found = ((key, _TEMPLATE.fullmatch(value)) for table in tables for key, value in table.items())
    names = {match[1] for key, match in found if match and (is_sensitive(key) or is_sensitive(match[1]))}
    values = {host.get(name, "") for name in names}
    return tuple(sorted((value for value in values if len(value) >= _MIN_SECRET_LENGTH), key=len, reverse=True))


AGENT_DIR = "/logs/agent"


def _resolved(root: Path, table: str, env: Mapping[str, str]) -> dict[str, str]:
    return resolve_env(env, where=f"{root / TASK_TOML}: [{table}.env]")


@dataclass(frozen=True, eq=False)
class HarborStage:
    """One instruction of a Harbor task, with its tests. Implements `ares_exp.tasks.task_contract.Stage`.

    A task with `[[steps]]` in its task.toml has one stage per step. Any other task has a single stage.

    Attributes:
        root: Absolute path of the task directory.
        config: Content of task.toml.
        instruction: The agent's instruction, without canary lines.
        step: The entry of `[[steps]]`; `None` if the task has no steps.
        reward_key: Key of the reward in `reward.json`; see `choose_reward`.
        follows_shared: Whether the previous step's tests ran in the agent's container; false for the first step.
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
        """Always `None`: the Harbor format does not set a shell, so the default of the container's backend is used."""
        return None

    @property
    def agent_network(self) -> NetworkPolicy:
        """Network policy of the agent's container while the agent runs."""
        return self._agent.network or self.config.agent.network or self.config.environment.network

    @property
    def verifier_timeout_sec(self) -> float:
        """Time limit of the verification in seconds. A step without a limit gets 600, not the task's limit."""
        return self._verifier.timeout_sec

    @property
    def verifier_user(self) -> User | None:
        """User of the test script; `None` for the image's user."""
        own = self._verifier.user
        return self.config.verifier.user if own is None else own

    @property
    def verifier_network(self) -> NetworkPolicy:
        """Network policy, while the tests run, of the container in which they run."""
        base = self._verifier_environment if self.verifier_mode == "separate" else self.config.environment
        return self._verifier.network or self.config.verifier.network or base.network

    @property
    def verifier_mode(self) -> VerifierMode:
        """`shared` if the tests run in the agent's container, otherwise `separate`. A step may have its own mode."""
        own = self._verifier
        return own.mode if own.environment_mode or own.environment else self.config.verifier.mode

    @property
    def _verifier_environment(self) -> EnvironmentSection:
        """The `[verifier.environment]` of the step, otherwise of the task; `[environment]` if both are missing."""
        return self._verifier.environment or self.config.verifier.environment or self.config.environment

    @cached_property
    def _verifier_image(self) -> tuple[str | None, Path | None]:
        """Image or build context of the verifier's container; both `None` if the verifier uses the agent's image."""
        for section, tests in ((self._verifier, self.folder / "tests"), (self.config.verifier, self.root / "tests")):
            if section.environment is not None and section.environment.docker_image:
                return section.environment.docker_image, None
            if any((tests / name).exists() for name in CONTAINER_DEFINITIONS):
                return None, tests
        return None, None

    @property
    def brings_tests(self) -> bool:
        """Whether the verifier's separate container has its own image, which must already contain the tests."""
        return self.verifier_mode == "separate" and self._verifier_image != (None, None)

    @property
    def verifier_spec(self) -> ContainerSpec | None:
        """Specification of the verifier's separate container; `None` if the tests run in the agent's container.

        Raises `TaskError` if task.toml refers to an environment variable that is not set on the host.
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
            env=_resolved(self.root, "verifier.environment", table.env),
            network=table.network,
            phase_networks=frozenset((self.verifier_network,)) - {table.network},
            cpus=table.cpus,
            memory_mb=table.memory_mb,
            storage_mb=table.storage_mb,
            gpus=table.gpus,
            users=frozenset() if user is None else frozenset((user,)),
            start_timeout_sec=environment.build_timeout_sec,
        )

    def check_test_script(self, chosen: UploadFilter) -> None:
        """Raises `TaskError` if the test script is missing or excluded, unless the verifier's image has the tests."""
        if self.brings_tests:
            return
        name = "test.bat" if self.config.environment.os == "windows" else "test.sh"
        folders = (self.folder / "tests", self.root / "tests")
        script = next((folder / name for folder in folders if (folder / name).exists()), None)
        if script is None:
            raise TaskError(f"{self.root / 'tests' / name}: the script that scores the task is missing.")
        require_uploaded(script, chosen)

    def check_runnable(self, *, needs_solution: bool) -> None:
        """Raises `TaskError` if a host variable of the stage is not set, or a required solution is missing."""
        self._verifier_env()
        _ = self.verifier_spec  # resolves its variables
        if needs_solution:
            find_solution(self.root, self.folder)
            self.solution_env()

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values of host variables with sensitive names that the `env` tables of the task and of all its steps use."""
        verifiers = (self.config.verifier, *(step.verifier for step in self.config.steps))
        tables = [one.env for verifier in verifiers for one in (verifier, verifier.environment) if one is not None]
        return secret_values((self.config.environment.env, self.config.solution.env, *tables))

    def _verifier_env(self) -> dict[str, str]:
        shared = _resolved(self.root, "verifier", self.config.verifier.env)
        return shared | _resolved(self.root, "steps.verifier" if self.step else "verifier", self._verifier.env)

    def solution_env(self) -> Mapping[str, str]:
        """Returns the environment variables of the solution, which may contain secrets; see `Stage.solution_env`."""
        return {"DEBIAN_FRONTEND": "noninteractive", **_resolved(self.root, "solution", self.config.solution.env)}

    async def upload_solution(self, container: Container) -> Mapping[str, str]:
        """Uploads the solution to `/solution` in the container; see `Stage.upload_solution`."""
        await upload_solution(container, self.root, self.folder)
        return self.solution_env()

    @property
    def start_timeout_sec(self) -> float:
        """Time limit of the step's set-up script and health check, in seconds."""
        return longest_set_up_sec(self.folder, self.step.healthcheck) if self.step is not None else 0.0

    async def start(self, container: Container) -> None:
        """Prepares the container for a step: empties log directories, copies the step's files, and runs its set-up.

        Does nothing for a task without steps, because `HarborTask.set_up` has already prepared its container.
        """
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
        """Empties `/logs/verifier` and `/tests` in the agent's container, so that the agent cannot fake a result there.

        After this call, only the verifier's user and root can write to `/logs/verifier`. Collect hooks run after this
        call, so files that they write to these directories are kept. If the task sets `stop_processes = true` in
        `[metadata]`, all processes of the agent are stopped first.

        Returns `/tests` if this directory was not empty and the task has no steps. The caller then restores the files
        that the image contains there.
        """
        if self.config.metadata.get("stop_processes") is True:
            await stop_processes(container)
        await reserve_log_dir(container, VERIFIER_DIR, self.verifier_user)
        had_tests = await empty(container, TESTS_DIR)
        return (TESTS_DIR,) if had_tests and self.step is None else ()

    async def prepare_verifier(self, container: Container, artifacts: Path) -> None:
        """Creates `/logs/verifier` in the verifier's separate container, and uploads the collected artifacts."""
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
        """Uploads the tests to `/tests` in the container, unless the container's image contains them.

        A step's tests are uploaded after the task's tests, and replace files with the same path.

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
        """Returns whether the next step runs: false only if this step's `min_reward` is not reached."""
        return self.step is None or self.step.min_reward is None or reaches(verdict, self.step.min_reward)


LOG_DIRS = "/logs/agent /logs/verifier /logs/artifacts"


@dataclass(frozen=True, eq=False)
class HarborTask:
    """A task in the Harbor format, read from one directory. Implements `ares_exp.tasks.task_contract.Task`.

    Attributes:
        path: Absolute path of the task directory.
        bounds: Folders to which symbolic links in the task may point.
        config: Content of task.toml.
        stages: One stage per step; one stage for a task without steps.
        warnings: Messages for the user about ignored or outdated keys in task.toml.
        reward_key: Key of the reward in `reward.json`; see `choose_reward`.
        origin: Git repository from which the task was fetched; `None` for a local task.
        extra_instructions: Strings that the run appends to the instructions.
    """

    path: Path
    bounds: LinkBounds
    config: TaskToml
    stages: tuple[HarborStage, ...]
    warnings: tuple[str, ...] = ()
    reward_key: str | None = None
    origin: TaskOrigin | None = None
    extra_instructions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The base name of the directory."""
        return self.path.name

    @cached_property
    def context(self) -> AgentContext:
        """The prior conversation, skills and MCP servers for the agent. The first access reads `trajectory.json`."""
        environment = self.config.environment
        return AgentContext(
            messages=read_prior_context(self.stages[0].folder / TRAJECTORY),
            skills_dir=environment.skills_dir or None,
            mcp_servers=environment.mcp_servers,
        )

    def with_extra_instructions(self, texts: Sequence[str]) -> HarborTask:
        """Returns a copy of the task with `texts` appended to every instruction, each after a blank line."""
        stages = (replace(stage, instruction="\n\n".join((stage.instruction, *texts))) for stage in self.stages)
        return replace(self, stages=tuple(stages), extra_instructions=(*self.extra_instructions, *texts))

    @property
    def container_spec(self) -> ContainerSpec:
        """Specification of the agent's container. Raises `TaskError` if a host variable in task.toml is not set."""
        environment = self.config.environment
        networks = {stage.agent_network for stage in self.stages}
        networks |= {stage.verifier_network for stage in self.stages if stage.verifier_mode == "shared"}
        return ContainerSpec(
            name=self.name,
            docker_image=environment.docker_image or None,
            context_dir=self._environment_dir if self._environment_dir.is_dir() else None,
            compose_file=compose_file(self._environment_dir),
            workdir=environment.workdir,
            env=_resolved(self.path, "environment", environment.env),
            network=environment.network,
            phase_networks=frozenset(networks - {environment.network}),
            cpus=environment.cpus,
            memory_mb=environment.memory_mb,
            storage_mb=environment.storage_mb,
            gpus=environment.gpus,
            users=frozenset(user for stage in self.stages for user in _users_of(stage) if user is not None),
            start_timeout_sec=environment.build_timeout_sec,
            directories=(TESTS_DIR, SOLUTION_DIR, "/logs"),
        )

    @property
    def _environment_dir(self) -> Path:
        return self.path / "environment"

    @cached_property
    def digest(self) -> str:
        """`sha256:` and the hex digest of the task's content. The first access reads every file."""
        return content_digest(self.bounds)

    def describe(self) -> Mapping[str, Any]:
        """Returns the name, path, digest and origin of the task for records. The first call reads every file."""
        package = self.config.task
        return {
            "format": "harbor",
            "name": self.name,
            "path": str(self.path),
            "digest": self.digest,
            "reward_key": self.reward_key,
            "package": package.name if package else None,
            "package_version": package.version if package else None,
            "origin": asdict(self.origin) if self.origin else None,
            "extra_instructions": list(self.extra_instructions),
            "metadata": self.config.model_dump(mode="json", include={"metadata"})["metadata"],
        }

    def check_runnable(self, *, needs_solution: bool = False, supported: frozenset[str] | None = None) -> None:
        """Checks the task before a run, so that its errors do not occur later in an episode. Does not start anything.

        Args:
            needs_solution: Whether the policy runs the task's own solution.
            supported: Names of the `AgentContext` parts that the agent supports; `None` skips this check.

        Raises:
            UnsupportedTaskError: The task uses unsupported features. The message lists the features.
            TaskError: An environment variable of the host or the required solution is missing, the prior conversation
                is not an ATIF document, an artifact or hook names a service but the task has no compose file, or
                `stop_processes` is not a boolean.
        """
        unsupported = refusals(self.config)
        if unsupported:
            raise UnsupportedTaskError(
                f"{self.path}: task {self.name!r} uses unsupported features: {', '.join(unsupported)}. "
                f"Leave it out with env.exclude=[{self.name}]."
            )
        named = {artifact.service for stage in self.stages for artifact in stage.artifacts}
        named |= {hook.service for stage in self.stages for hook in stage.collect_hooks}
        if (services := named - {MAIN_SERVICE}) and compose_file(self._environment_dir) is None:
            raise TaskError(
                f"{self.path / TASK_TOML}: artifacts or collect hooks name the services "
                f"{', '.join(sorted(services))}, but no environment/{COMPOSE} defines them. Correct the names, "
                "or add the file."
            )
        if not isinstance(stop := self.config.metadata.get("stop_processes", False), bool):
            raise TaskError(
                f"{self.path / TASK_TOML}: expected [metadata] stop_processes to be true or false, got {stop!r}."
            )
        if supported is not None and (missing := sorted(self.context.needs - supported)):
            raise UnsupportedTaskError(
                f"{self.path}: task {self.name!r} needs features that this agent does not support: "
                f"{', '.join(missing)}. Choose another agent (the options of agent=command must "
                f"contain $ARES_MCP_FILE and $ARES_SKILLS), or leave the task out with env.exclude=[{self.name}]."
            )
        _resolved(self.path, "environment", self.config.environment.env)
        for stage in self.stages:
            stage.check_runnable(needs_solution=needs_solution)
            protect(stage.secrets)

    @property
    def set_up_timeout_sec(self) -> float:
        """Time limit of the container's health check, in seconds."""
        return longest_sec(self.config.environment.healthcheck)

    async def set_up(self, container: Container) -> None:
        """Creates log directories, copies `environment/` if the image is prebuilt, and waits for the health check."""
        await as_root(container, f"mkdir -p {LOG_DIRS} && chmod 777 {LOG_DIRS}", purpose="create the log directories")
        here = await container.exec("pwd", user="root", timeout_sec=60, shell=PLAIN_SHELL)
        if here.exit_code != 0:  # every command of the agent would fail in the same way
            raise ContainerStartError(
                f"Task {self.name} lacks its working directory: {here.output.strip()}. Create it in the Dockerfile."
            )
        await upload_image_files(container, self._environment_dir, self.config.environment)
        if self.config.environment.healthcheck is not None:
            await await_health(self.config.environment.healthcheck, container)

    def reward(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Returns the mean of the steps' verdicts or, with `multi_step_reward_strategy = "final"`, the last verdict."""
        if not self.config.steps or self.config.multi_step_reward_strategy == "final":
            return verdicts[-1]
        return overall_verdict(verdicts, reward_key=self.reward_key)


def _users_of(stage: HarborStage) -> tuple[User | None, ...]:
    hooks = (hook.user for hook in stage.collect_hooks if hook.service == MAIN_SERVICE)
    return (stage.agent_user, stage.verifier_user if stage.verifier_mode == "shared" else None, *hooks)


def load_task(path: str | Path, *, reward_key: str | None = None, links_within: Path | None = None) -> HarborTask:
    """Loads and validates the task directory `path`.

    Does not check for unsupported features, because `HarborTask.check_runnable` reports them.

    Args:
        path: The task directory.
        reward_key: Key of the reward in `reward.json`; see `choose_reward`.
        links_within: Folder of tasks into which symbolic links in the task may also point. With `None`, links may only
            point into the task itself.

    Raises:
        TaskError: The directory is not a valid task. The message describes the error and its location.
    """
    bounds = LinkBounds.of(Path(path), links_within)
    root = bounds.root
    check_definition_links(bounds)
    parsed = read_task_toml(root / TASK_TOML, bounds)
    stages: tuple[HarborStage, ...] = ()
    steps: Sequence[Step | None] = parsed.config.steps or (None,)
    chosen = UploadFilter(root)
    for step in steps:
        text = read_instruction((root / "steps" / step.name if step else root) / INSTRUCTION, bounds)
        follows_shared = bool(stages) and stages[-1].verifier_mode == "shared"
        stage = HarborStage(root, parsed.config, text, step, reward_key, follows_shared, is_last=step is steps[-1])
        stage.check_test_script(chosen)
        stages = (*stages, stage)
    for folder in (*(stage.folder for stage in stages if stage.step), root / "tests", root / "solution"):
        check_links(folder, LinkBounds(root), chosen)
    if any(stage.verifier_mode == "separate" and not stage.brings_tests for stage in stages):
        # These links are copied to the verifier's container. In the agent's container, links may lead elsewhere.
        check_links(root / "environment", bounds, chosen)
    warnings = [f"{TASK_TOML}: {warning}" for warning in warnings_of(parsed)]
    warnings += [f"{path.relative_to(root)} is empty" for path in empty_instructions(stages)]
    return HarborTask(
        path=root,
        bounds=bounds,
        config=parsed.config,
        stages=stages,
        warnings=tuple(f"{root.name}: {warning}" for warning in warnings),
        reward_key=reward_key,
    )


def empty_instructions(stages: Sequence[HarborStage]) -> list[Path]:
    """Returns the paths of instruction files that contain no text."""
    return [stage.folder / INSTRUCTION for stage in stages if not stage.instruction.strip()]
