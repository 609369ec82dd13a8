"""Contract of an environment source, which is created from an option of the `env` group."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from ares_exp.agents.code_agent import AgentFactoryBase
from ares_exp.config.parts import completed
from ares_exp.config.targets import SCORER, instantiate_group
from ares_exp.containers.container import ContainerFactoryBase, ContainerSpec
from ares_exp.environment import Environment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import ConfigError, TaskError, UnsupportedTaskError
from ares_exp.llms.request import LLMClient
from ares_exp.tasks.selection import Named
from ares_exp.tasks.task_contract import Task, TaskOrigin

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ares_exp.environments.own_model import OwnModel
    from ares_exp.environments.restoring import EpisodeStart


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """The parts of one episode's environment.

    Attributes:
        container_factory: Factory for its container.
        code_agent_factory: Factory for its code agent.
        limits: Limits that truncate it.
        seed: Seed of the episode.
        provide_solution: Whether to provide the task's solution for the oracle: in the container, or, without a
            container, in the requests as `metadata["solution"]`.
        output_dir: Directory for files of the episode (`verifier/`, `artifacts/`), or `None`.
        start_from: Start of an episode that continues another one; only for a source with `exports_state`.
        episode_id: Id of the episode in its run; `None` outside of a run.
        attempt: Number of the attempt at the task, starting at 0.
        background_client: Client that answers background requests without a step. With `None`, they are observations.
    """

    container_factory: ContainerFactoryBase
    code_agent_factory: AgentFactoryBase
    limits: EpisodeLimits
    seed: int
    provide_solution: bool = False
    output_dir: Path | None = None
    start_from: EpisodeStart | None = None
    episode_id: str | None = None
    attempt: int = 0
    background_client: LLMClient | None = None

    def container_specs(self, task: Task) -> list[ContainerSpec]:
        """Returns all containers that a task needs: the agent's with its mounts, then the verifiers' containers."""
        agents, *others = self.limits.time.container_specs(task)
        mounts = () if self.provide_solution else self.code_agent_factory.mounts
        return [replace(agents, mounts=mounts), *others]

    def check_containers(self, task: Task) -> list[str]:
        """Checks that the backend can run every container of a task, and returns its warnings.

        Raises:
            TaskError: The backend cannot run a container of the task.
        """
        specs, containers = self.container_specs(task), self.container_factory
        if containers.max_containers is not None and len(specs) > containers.max_containers:
            raise UnsupportedTaskError(
                f"{task.name}: the tests have a separate container, and container={containers.name} can run "
                f"{containers.max_containers} at a time on this machine. Use container=docker."
            )
        return [warning for spec in specs for warning in containers.check(spec)]


Report = Callable[[str], None]
"""Callback for a warning to the user about a problem that does not stop the run."""


@runtime_checkable
class EnvironmentSource(Protocol):
    """A task set, and the environments that run its tasks.

    These members are required. `SourceBase` has the optional members and their defaults. A source may inherit from it
    or define any of its members.
    """

    @property
    def path(self) -> Path | None:
        """Location of the task set for the provenance; `None` if it has no location."""
        ...

    def load(self, report: Report) -> Sequence[str]:
        """Reads the task set and selects tasks.

        Returns:
            Names of the selected tasks, in order.

        Raises:
            UserError: The task set is missing or malformed, or no task is selected.
        """
        ...

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Rejects tasks that cannot be run with these parts, before anything starts.

        Raises:
            UserError: A task cannot be run. One message lists every such task and its reason.
        """
        ...

    def make(self, task_name: str, parts: EpisodeParts) -> Environment:
        """Creates the environment of one episode of `task_name`."""
        ...


class SourceBase(EnvironmentSource):
    """The complete interface of a source, with defaults for the members that `EnvironmentSource` does not require."""

    @property
    def needs_container(self) -> bool:
        """Whether its environments need a container and a code agent, which are checked only in this case.

        Default: yes.
        """
        return True

    @property
    def exports_state(self) -> bool:
        """Whether its environments have `export_state`, which `snapshot=…` and `branch_from=…` require. Default: no."""
        return False

    @property
    def has_solutions(self) -> bool:
        """Whether its environments use `EpisodeParts.provide_solution`, so that `policy=oracle` can run them.

        Default: yes if they have a container, which receives the solution.
        """
        return self.needs_container

    @property
    def loads_offline(self) -> bool:
        """Whether `load` reads only local files. Otherwise, it is not called just to count tasks. Default: no."""
        return False

    @property
    def tasks(self) -> Sequence[Task]:
        """Selected tasks in order, for lists of tasks. Default: empty, for a source that knows only their names."""
        return ()

    @property
    def origins(self) -> Mapping[str, TaskOrigin]:
        """Origins of the tasks from git repositories, by task name, for the run's provenance. Default: empty."""
        return {}

    @property
    def spenders(self) -> Sequence[str]:
        """Descriptions of the components with their own model calls (`environment_usage`). Default: none known."""
        return ()

    @property
    def own_models(self) -> Sequence[OwnModel]:
        """Models that its environments and their scorers use, available after `load`. Default: none.

        On a cluster, the run's process sends their requests, because it has their keys and limits.
        """
        return ()

    def digest(self, task_name: str) -> str | None:
        """Returns a digest that changes with the task. Blocking. Default: `None`, unknown."""
        return None

    def keep(self, task_names: Sequence[str]) -> None:
        """Removes all other tasks from the selection.

        Default: does nothing, so that `check` also checks these tasks.
        """

    async def preflight(self) -> None:
        """Checks, after `load`, the resources of the source other than its tasks.

        Raises:
            PreflightError: A resource is not ready. The message suggests a fix.
        """

    async def close(self) -> None:
        """Releases the resources of the source. Idempotent."""


def as_source(source: EnvironmentSource) -> SourceBase:
    """Returns `source` with the defaults of `SourceBase` for missing members."""
    return completed(source, SourceBase)


def make_source(config: DictConfig) -> SourceBase:
    """Creates the source of the `env` option.

    Raises:
        ConfigError: The source cannot be created, or the object is not a source.
    """
    return as_source(instantiate_group(config, "env"))


def make_scored_source(config: DictConfig) -> SourceBase:
    """Creates the source of the `env` option, with the scorers of `env.scorers`, if any.

    Raises:
        ConfigError: The source or a scorer cannot be created.
    """
    from omegaconf import OmegaConf

    source = make_source(config)
    if not any(OmegaConf.select(config, key) for key in (SCORER, "env.scorers")):
        return source
    from ares_exp.environments.scoring.scored_source import ScoredSource, make_scoring_rules

    rules = make_scoring_rules(config)
    return completed(ScoredSource(source, rules), SourceBase) if rules.scorers else source


T = TypeVar("T", bound=Named)


def choose_task(tasks: Sequence[T], options: Mapping[str, Any], generator: random.Random) -> T:
    """Returns the task with the name or index `options["task"]`, or a random task from `generator` if it is not set.

    Raises:
        ConfigError: The task does not exist, or there are other options.
    """
    return tasks[choose_index([task.name for task in tasks], options, generator)]


def choose_index(names: Sequence[str], options: Mapping[str, Any], generator: random.Random) -> int:
    """Returns the index among `names` of the task `options["task"]`; see `choose_task`."""
    if unknown := sorted(options.keys() - {"task"}):
        raise ConfigError(f"Expected only the option `task` in reset(options=…), got also {unknown}.")
    wanted = options.get("task")
    if wanted is None:
        return generator.randrange(len(names))
    if isinstance(wanted, int) and 0 <= wanted < len(names):
        return wanted
    if wanted in names:
        return names.index(wanted)
    shown = ", ".join(names[:20])
    raise ConfigError(f"Expected a task's name or its index below {len(names)}, got {wanted!r}. Tasks: {shown}.")


SHOWN_REFUSALS = 10


def refuse_together(tasks: Iterable[T], check: Callable[[T], object]) -> None:
    """Checks every task.

    Args:
        tasks: Tasks to check.
        check: Function that raises `TaskError` for a task that cannot be run.

    Raises:
        UnsupportedTaskError: At least one task cannot be run. The message lists the first reasons and how to run the
            other tasks.
    """
    refused: dict[str, str] = {}
    for task in tasks:
        try:
            check(task)
        except TaskError as error:
            refused[task.name] = str(error)
    if refused:
        shown = list(refused.values())[:SHOWN_REFUSALS]
        shown += [f"… and {len(refused) - len(shown)} more."] if len(refused) > len(shown) else []
        shown.append(f"To run the others: env.exclude=[{','.join(list(refused)[:SHOWN_REFUSALS])}].")
        raise UnsupportedTaskError("\n".join(shown))
