"""The contract of environment sources. Each option of the `env` group, such as `env=harbor`, makes a source."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from ares_exp.agents.code_agent import AgentFactoryBase
from ares_exp.config.parts import completed
from ares_exp.config.targets import SCORER, instantiate_group
from ares_exp.containers.container import ContainerFactoryBase, ContainerSpec
from ares_exp.environment import Environment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import ConfigError, UnsupportedTaskError
from ares_exp.llms.request import LLMClient
from ares_exp.tasks.selection import Entries, Named, positions_of, select
from ares_exp.tasks.task_contract import Task, TaskOrigin

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ares_exp.environments.own_model import OwnModel
    from ares_exp.environments.restoring import EpisodeStart


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """The factories, limits and other settings from which a source makes the environment of one episode.

    Attributes:
        container_factory: Factory of the container.
        code_agent_factory: Factory of the code agent.
        limits: Limits that truncate the episode.
        seed: Seed of the episode.
        provide_solution: Whether the policy runs the task's solution (`policy=oracle`). The solution is then put into
            the container. An environment without a container puts it into `metadata["solution"]` of its requests.
        output_dir: Directory for files of the episode (`verifier/`, `artifacts/`), or `None`.
        start_from: Recorded episode to continue, instead of starting a new one. Requires a source whose `exports_state`
            is true.
        episode_id: Id of the episode in its run; `None` outside of a run.
        attempt: Number of the attempt at the task, from 0.
        background_client: LLM client that responds to the agent's background requests, so that they do not become
            steps. With `None`, they become observations.
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
        """Lists the containers that a task needs: the agent's container, then separate containers of verifiers."""
        time = self.limits.time
        mounts = () if self.provide_solution else self.code_agent_factory.mounts
        verifiers = (time.verifier_spec(task, stage) for stage in task.stages)
        return [replace(time.container_spec(task), mounts=mounts), *(spec for spec in verifiers if spec is not None)]

    def check_containers(self, task: Task) -> list[str]:
        """Checks that the container backend can run every container of a task.

        Returns the backend's warnings about limits that it will not enforce.

        Raises:
            TaskError: The backend cannot run a container of the task.
        """
        specs, containers = self.container_specs(task), self.container_factory
        if containers.max_containers is not None and len(specs) > containers.max_containers:
            raise UnsupportedTaskError(
                f"{task.name}: the tests need a separate container, but container={containers.name} supports at most "
                f"{containers.max_containers} at a time on this machine. Use container=docker."
            )
        return [warning for spec in specs for warning in containers.check(spec)]


T = TypeVar("T", bound=Named)
U = TypeVar("U", bound=Named)
Report = Callable[[str], None]
"""Callback that shows the user a warning, for example about an invalid task in a folder."""
Entry = int | str
"""One entry of the option `tasks`: an index, or a name, glob, slice or shard as text (see `select`)."""


@runtime_checkable
class EnvironmentSource(Protocol):
    """A task set, and the environments that run its tasks.

    A source must have the members `path`, `load`, `check` and `make`. `SourceBase` defines the optional members and
    their defaults. Your source may inherit from it, or define only the optional members that it needs.
    """

    @property
    def path(self) -> Path | None:
        """Path of the task set, which is recorded with a run; `None` if the task set has no path."""

    def load(self, report: Report) -> Sequence[str]:
        """Reads the task set, selects tasks, and returns their names in order.

        Raises:
            UserError: The task set is missing or malformed, or no task is selected.
        """

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Checks that the tasks can be run with `parts`. Called before any episode of a run starts.

        Raises:
            UserError: A task cannot be run. One message names every such task and the reason.
        """

    def make(self, task_name: str, parts: EpisodeParts) -> Environment:
        """Creates the environment of one episode of `task_name`."""


class SourceBase(EnvironmentSource):
    """Defines all members of a source, with defaults for the optional members."""

    positions: Mapping[str, int] = MappingProxyType({})
    """Position of each task in the whole task set, by task name. `load` sets it. Default: unknown."""

    @property
    def needs_container(self) -> bool:
        """Whether the environments use a container and a code agent, so that a run checks both. Default: yes."""
        return True

    @property
    def exports_state(self) -> bool:
        """Whether the environments have `export_state`, which `snapshot=…` and `branch_from=…` require. Default: no."""
        return False

    @property
    def has_solutions(self) -> bool:
        """Whether the environments support `EpisodeParts.provide_solution`, which `policy=oracle` requires.

        Default: the value of `needs_container`, because the solution is put into the container.
        """
        return self.needs_container

    @property
    def loads_offline(self) -> bool:
        """Whether `load` reads only local files, so that it may also be called merely to count tasks. Default: no."""
        return False

    @property
    def tasks(self) -> Sequence[Task]:
        """The selected tasks in order, for task lists; empty if the source knows only their names. Default: empty."""
        return ()

    @property
    def origins(self) -> Mapping[str, TaskOrigin]:
        """Git repository and commit of each task from a repository, by task name, for the records. Default: empty."""
        return {}

    @property
    def spenders(self) -> Sequence[str]:
        """Names of components, such as `the oracle`, whose model calls count as `environment_usage`. Default: empty."""
        return ()

    @property
    def own_models(self) -> Sequence[OwnModel]:
        """The models that the environments and their scorers call, available after `load`. Default: empty.

        On a cluster, the run's own process sends the requests to these models, because only that process has the
        models' keys and limits.
        """
        return ()

    def digest(self, task_name: str) -> str | None:
        """Returns a digest that changes if the task changes; `None` if it is unknown. Blocking. Default: `None`."""
        return None

    def keep(self, task_names: Sequence[str]) -> None:
        """Drops all selected tasks except `task_names`, so that `check` skips the others. Default: drops nothing."""

    async def preflight(self) -> None:
        """Checks that the resources of the source, such as its models, are ready. Called after `load`.

        Containers and agents are checked separately.

        Raises:
            PreflightError: A resource is not ready. The message suggests a fix.
        """

    async def close(self) -> None:
        """Releases the resources of the source. Idempotent."""


class SelectingSource(SourceBase, Generic[T]):
    """A base class for sources whose options `tasks`, `exclude` and `limit` select tasks from a set; see `select`."""

    def __init__(self, preset: str, *, tasks: Entries, exclude: str | Sequence[str] | None, limit: int | None) -> None:
        """Stores the options. `preset` is the value of `env`, for messages."""
        self._selection: dict[str, Any] = {
            "preset": preset,
            "tasks_selector": tasks,
            "exclude": exclude,
            "limit": limit,
        }
        self._selected: dict[str, T] = {}

    @property
    def path(self) -> Path | None:
        """Path of the task set. Default: `None`."""
        return None

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Checks the tasks before a run. Default: no check."""

    def _choose(self, tasks: Sequence[U]) -> list[U]:
        """Returns the tasks that the options select from `tasks`, the whole set. Stores the positions of all tasks."""
        self.positions = positions_of(tasks)
        return select(tasks, **self._selection)

    def _hold(self, tasks: Sequence[T]) -> list[str]:
        """Stores the selected tasks, and returns their names."""
        self._selected = {task.name: task for task in tasks}
        return list(self._selected)

    def keep(self, task_names: Sequence[str]) -> None:
        """Drops all selected tasks except `task_names`."""
        self._selected = {name: self._selected[name] for name in task_names}


def as_source(source: EnvironmentSource) -> SourceBase:
    """Returns `source`, with the defaults of `SourceBase` for optional members that it lacks."""
    return completed(source, SourceBase)


def make_source(config: DictConfig) -> SourceBase:
    """Creates the source that the `env` option of `config` selects. Raises `ConfigError` if this fails."""
    return as_source(instantiate_group(config, "env"))


def make_scored_source(config: DictConfig) -> SourceBase:
    """Creates the source that the `env` option selects. If the config has scorers, they score its episodes."""
    from omegaconf import OmegaConf

    source = make_source(config)
    if not any(OmegaConf.select(config, key) for key in (SCORER, "env.scorers")):
        return source
    from ares_exp.environments.scoring.scored_source import ScoredSource, make_scoring_rules

    rules = make_scoring_rules(config)
    return completed(ScoredSource(source, rules), SourceBase) if rules.scorers else source


def choose_task(tasks: Sequence[T], options: Mapping[str, Any], generator: random.Random) -> T:
    """Returns the task with the name or index `options["task"]`. Without this option, chooses a task at random."""
    return tasks[choose_index([task.name for task in tasks], options, generator)]


def choose_index(names: Sequence[str], options: Mapping[str, Any], generator: random.Random) -> int:
    """Returns the index of the task with the name or index `options["task"]`; without this option, a random index.

    Raises:
        ConfigError: The task does not exist, or `options` has other keys.
    """
    if unknown := sorted(options.keys() - {"task"}):
        raise ConfigError(f"Expected only the option `task` in reset(options=…), but got {unknown}.")
    wanted = options.get("task")
    if wanted is None:
        return generator.randrange(len(names))
    if isinstance(wanted, int) and 0 <= wanted < len(names):
        return wanted
    if wanted in names:
        return names.index(wanted)
    shown = ", ".join(names[:20])
    raise ConfigError(f"Expected the name of a task or an index below {len(names)}, got {wanted!r}. Tasks: {shown}.")
