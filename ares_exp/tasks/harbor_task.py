"""`HarborTask`, a task directory in the Harbor format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ares_exp.containers.container import Container, ContainerSpec, User
from ares_exp.errors import ContainerStartError, TaskError, UnsupportedTaskError
from ares_exp.records.secrets import protect
from ares_exp.tasks.env_templates import resolve_env
from ares_exp.tasks.harbor_stage import HarborStage
from ares_exp.tasks.instruction import TRAJECTORY, read_instruction, read_prior_context
from ares_exp.tasks.task_contract import AgentContext, TaskOrigin, Verdict
from ares_exp.tasks.task_files import (
    COMPOSE,
    INSTRUCTION,
    UploadFilter,
    check_definition_links,
    check_files,
    check_links,
    compose_file,
    content_digest,
    upload_image_files,
)
from ares_exp.tasks.task_toml import MAIN_SERVICE, TASK_TOML, Step, TaskToml, read_task_toml, refusals, warnings_of
from ares_exp.tasks.verification.link_bounds import LinkBounds
from ares_exp.tasks.verification.rewards import overall_verdict
from ares_exp.tasks.verification.root_commands import PLAIN_SHELL, as_root
from ares_exp.tasks.verification.step_setup import SOLUTION_DIR, await_health, longest_sec
from ares_exp.tasks.verification.verification import TESTS_DIR

LOG_DIRS = "/logs/agent /logs/verifier /logs/artifacts"


@dataclass(frozen=True, eq=False)
class HarborTask:
    """One task directory. Implements `ares_exp.tasks.task_contract.Task`.

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
        """The data that the agent gets in addition to the instruction. The first access reads a file."""
        environment = self.config.environment
        return AgentContext(
            messages=read_prior_context(self.stages[0].folder / TRAJECTORY),
            skills_dir=environment.skills_dir or None,
            mcp_servers=environment.mcp_servers,
        )

    def with_extra_instructions(self, texts: Sequence[str]) -> HarborTask:
        """Returns a copy of the task. `texts` are appended to every step's instruction, each after a blank line."""
        stages = (replace(stage, instruction="\n\n".join((stage.instruction, *texts))) for stage in self.stages)
        return replace(self, stages=tuple(stages), extra_instructions=(*self.extra_instructions, *texts))

    @property
    def container_spec(self) -> ContainerSpec:
        """Specification of the agent's container. Raises `TaskError` if a variable of the host is missing."""
        environment = self.config.environment
        networks = {stage.agent_network for stage in self.stages}
        networks |= {stage.verifier_network for stage in self.stages if stage.verifier_mode == "shared"}
        return ContainerSpec(
            name=self.name,
            docker_image=environment.docker_image or None,
            context_dir=self._environment_dir if self._environment_dir.is_dir() else None,
            compose_file=compose_file(self._environment_dir),
            workdir=environment.workdir,
            env=self._resolved("environment", environment.env),
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

    def _resolved(self, table: str, env: Mapping[str, str]) -> dict[str, str]:
        return resolve_env(env, where=f"{self.path / TASK_TOML}: [{table}.env]")

    @cached_property
    def digest(self) -> str:
        """`sha256:` and the hex digest of the task's content. The first access reads every file."""
        return content_digest(self.bounds)

    def describe(self) -> Mapping[str, Any]:
        """Returns the JSON-ready identity of the task for records. The first call reads every file."""
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
        """Checks the task for errors that an episode would otherwise encounter. Does not start anything.

        Args:
            needs_solution: Whether the policy runs the task's own solution.
            supported: Names of the `AgentContext` parts that the agent supports; `None` skips this check.

        Raises:
            UnsupportedTaskError: The task uses unsupported features. The message lists the features.
            TaskError: An environment variable of the host or the required solution is missing, the prior context is not
                an ATIF document, a service is unknown, or `stop_processes` is not a boolean.
        """
        unsupported = refusals(self.config)
        if unsupported:
            raise UnsupportedTaskError(
                f"{self.path}: task {self.name!r} uses unsupported features: {', '.join(unsupported)}. "
                f"Leave it out with env.exclude=[{self.name}]."
            )
        if (services := _sidecars(self.stages)) and compose_file(self._environment_dir) is None:
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
        self._resolved("environment", self.config.environment.env)
        for stage in self.stages:
            stage.check_runnable(needs_solution=needs_solution)
            protect(stage.secrets)

    @property
    def set_up_timeout_sec(self) -> float:
        """Time limit of the container's health check, in seconds."""
        return longest_sec(self.config.environment.healthcheck)

    async def set_up(self, container: Container) -> None:
        """Creates the log directories, copies files if the image is prebuilt, and waits for the health check."""
        await as_root(container, f"mkdir -p {LOG_DIRS} && chmod 777 {LOG_DIRS}", purpose="create the log directories")
        here = await container.exec("pwd", user="root", timeout_sec=60, shell=PLAIN_SHELL)
        if here.exit_code != 0:  # every command of the agent would fail in the same way
            raise ContainerStartError(
                f"Task {self.name}: {here.output.strip()}. Create the directory in the Dockerfile (WORKDIR)."
            )
        await upload_image_files(container, self._environment_dir, self.config.environment)
        if self.config.environment.healthcheck is not None:
            await await_health(self.config.environment.healthcheck, container)

    def reward(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Returns the mean of the steps' verdicts or the last verdict; see `multi_step_reward_strategy`."""
        if not self.config.steps or self.config.multi_step_reward_strategy == "final":
            return verdicts[-1]
        return overall_verdict(verdicts, reward_key=self.reward_key)


def _users_of(stage: HarborStage) -> tuple[User | None, ...]:
    hooks = (hook.user for hook in stage.collect_hooks if hook.service == MAIN_SERVICE)
    return (stage.agent_user, stage.verifier_user if stage.verifier_mode == "shared" else None, *hooks)


def _sidecars(stages: Sequence[HarborStage]) -> set[str]:
    named = {artifact.service for stage in stages for artifact in stage.artifacts}
    return (named | {hook.service for stage in stages for hook in stage.collect_hooks}) - {MAIN_SERVICE}


def load_task(path: str | Path, *, reward_key: str | None = None, links_within: Path | None = None) -> HarborTask:
    """Loads and validates the task directory `path`.

    Unsupported features are reported by `HarborTask.check_runnable`, not by this function.

    Args:
        path: The task directory.
        reward_key: Key of the reward in `reward.json`; see `choose_reward`.
        links_within: Folder of tasks. Links in the task may also point into this folder. `None` only allows links
            inside the task.

    Raises:
        TaskError: The directory is not a valid task. The message describes the error and its location.
    """
    bounds = LinkBounds.of(Path(path), links_within)
    root = bounds.root
    check_definition_links(bounds)
    parsed = read_task_toml(root / TASK_TOML, bounds)
    check_files(root, parsed.config)
    stages = _stages(bounds, parsed.config, reward_key)
    if any(stage.verifier_mode == "separate" and not stage.brings_tests for stage in stages):
        # These links are copied to the verifier's container. In the agent's container, links may lead elsewhere.
        check_links(root / "environment", bounds, UploadFilter(root))
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


def _stages(bounds: LinkBounds, config: TaskToml, reward_key: str | None) -> tuple[HarborStage, ...]:
    root, stages = bounds.root, list[HarborStage]()
    steps: Sequence[Step | None] = config.steps or (None,)
    for step in steps:
        text = read_instruction((root / "steps" / step.name if step else root) / INSTRUCTION, bounds)
        follows_shared = bool(stages) and stages[-1].verifier_mode == "shared"
        stages.append(HarborStage(root, config, text, step, reward_key, follows_shared, is_last=step is steps[-1]))
    return tuple(stages)
