"""The contract of an environment source. Each option of the `env` group makes one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
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
    """The parts of an environment of one episode.

    Attributes:
        container_factory: Factory of its container.
        code_agent_factory: Factory of its code agent.
        limits: Limits that truncate it.
        seed: Seed of the episode.
        provide_solution: Whether the task's solution goes into the container or, in an environment without one, into
            its requests as `metadata["solution"]` (the oracle).
        output_dir: Directory for files of the episode (`verifier/`, `artifacts/`), or `None`.
        start_from: Recorded episode to continue, instead of a new start; only for a source that `exports_state`.
        episode_id: Id of the episode in its run; `None` outside of a run.
        attempt: Number of the attempt at the task, from 0.
        background_client: Client for background requests of the agent, which take no step; `None` makes them
            observations.
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
        """Lists every container that a task needs: the agent's, with its mounts, then the verifiers'."""
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

    These members are required. `SourceBase` defines the optional members and their defaults: inherit from it, or
    implement some of its members.
    """

    @property
    def path(self) -> Path | None:
        """Path of the task set, for its provenance; `None` if it has none."""
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
        """Checks, before anything starts, that the tasks can be run with these parts.

        Raises:
            UserError: A task cannot be run. One message names every such task and the reason.
        """
        ...

    def make(self, task_name: str, parts: EpisodeParts) -> Environment:
        """Creates the environment of one episode of `task_name`."""
        ...


class SourceBase(EnvironmentSource):
    """Defines all members of a source, with defaults for members that are optional in `EnvironmentSource`."""

    positions: Mapping[str, int] = MappingProxyType({})
    """Position of each task in the whole set, by name, set by `load`. Default: unknown."""

    @property
    def needs_container(self) -> bool:
        """Whether its environments need a container and a code agent. If not, neither is checked. Default: yes."""
        return True

    @property
    def exports_state(self) -> bool:
        """Whether its environments have `export_state`, which `snapshot=…` and `branch_from=…` require. Default: no."""
        return False

    @property
    def has_solutions(self) -> bool:
        """Whether its environments support `EpisodeParts.provide_solution`, so that `policy=oracle` can run them.

        Default: whether they have a container, because the solution is put there.
        """
        return self.needs_container

    @property
    def loads_offline(self) -> bool:
        """Whether `load` reads only local files. If not, it is not called just to count tasks. Default: no."""
        return False

    @property
    def tasks(self) -> Sequence[Task]:
        """The selected tasks in order, for task lists. Default: none, if the source knows only their names."""
        return ()

    @property
    def origins(self) -> Mapping[str, TaskOrigin]:
        """Origins of the tasks from git repositories, by task name, for the run's provenance. Default: empty."""
        return {}

    @property
    def spenders(self) -> Sequence[str]:
        """Names of the parts that call models in its episodes (`environment_usage`). Default: none."""
        return ()

    @property
    def own_models(self) -> Sequence[OwnModel]:
        """The models that its environments and their scorers ask, available after `load`. Default: none.

        On a cluster, the run's own process sends their requests, because it has their keys and limits.
        """
        return ()

    def digest(self, task_name: str) -> str | None:
        """Returns a digest that changes when a task changes. Blocking. Default: `None`, unknown."""
        return None

    def keep(self, task_names: Sequence[str]) -> None:
        """Drops all other tasks that `load` selected. Default: keeps them, so `check` also checks them."""

    async def preflight(self) -> None:
        """Checks, after `load`, the other resources of the source.

        Raises:
            PreflightError: A resource is not ready. The message suggests a fix.
        """

    async def close(self) -> None:
        """Releases the resources of the source. Idempotent."""


def as_source(source: EnvironmentSource) -> SourceBase:
    """Returns `source`, completed with the defaults of `SourceBase`."""
    return completed(source, SourceBase)


def make_source(config: DictConfig) -> SourceBase:
    """Creates the source of the `env` option.

    Raises:
        ConfigError: The object cannot be made, or is not a source.
    """
    return as_source(instantiate_group(config, "env"))


def make_scored_source(config: DictConfig) -> SourceBase:
    """Makes the source that the option of `env` describes, with the scorers of `env.scorers`, if any.

    Raises:
        ConfigError: The source or a scorer cannot be made.
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
    """Chooses the task that `options["task"]` names, by its name or its index. Without it, `generator` draws a task.

    Raises:
        ConfigError: The task does not exist, or `options` has other keys.
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
        tasks: The tasks.
        check: Function that raises `TaskError` for a task that cannot be run.

    Raises:
        UnsupportedTaskError: At least one task failed. The message has the reasons (at most the first few), and how to
            run the other tasks.
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
