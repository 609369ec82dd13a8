"""A preset that is an option of the `env` group: its environments are those that `env=…` plays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.agents.code_agent import CodeAgent, as_agent_factory
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.options import find_options, log_problems
from ares_exp.config.targets import added_defaults, import_target, instantiate_group
from ares_exp.containers.container import as_container_factory
from ares_exp.environment import Environment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.scoring.scored_source import make_scored_source
from ares_exp.environments.source import EpisodeParts, as_source
from ares_exp.errors import PresetError
from ares_exp.wrappers.preset_id import Selector
from ares_exp.wrappers.task_sampling_environment import TaskSamplingEnvironment

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ares_exp.containers.container import ContainerFactory
    from ares_exp.environments.source import SourceBase
    from ares_exp.trackers.tracker import Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """Description of a preset.

    Attributes:
        name: What `make` takes.
        description: One line of description.
        num_tasks: Number of tasks; `None` if counting them takes a network, or a file that is
            not here.
    """

    name: str
    description: str
    num_tasks: int | None

    def __str__(self) -> str:
        """Formats the description for people."""
        count = "an unknown number of" if self.num_tasks is None else str(self.num_tasks)
        return f"{self.name} ({count} task{'' if self.num_tasks == 1 else 's'}): {self.description}"


@dataclass(frozen=True)
class ConfiguredPreset:
    """Environments out of the config tree, as a spec for `register_preset`.

    ```python
    register_preset("mine", ConfiguredPreset("harbor", overrides=("env.path=path/to/tasks",)))
    ```

    Attributes:
        env: Option of the `env` group.
        agent: Option of the `agent` group, or a factory of agents; `None` for the default option.
        overrides: Further overrides, as on the command line: `env.path=…`, `agent.command_timeout_sec=…`.
        config_dirs: The user's folders of options, as with `--config-dir`.
        options: Values of the option of `env`, as Python objects.
        limits: Limits of an episode.
        seed: Seed of the choice of tasks.
        provide_solution: Whether the task's solution goes into the container.
    """

    env: str
    agent: str | Callable[..., CodeAgent] | None = None
    overrides: tuple[str, ...] = ()
    config_dirs: tuple[Path, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    seed: int = 0
    provide_solution: bool = False

    @property
    def name(self) -> str:
        """`env`, or `env-agent`."""
        return f"{self.env}-{self.agent}" if isinstance(self.agent, str) else self.env

    def get_info(self) -> EnvironmentInfo:
        """Returns name, description and number of tasks; counts the tasks if that takes no network."""
        described = {option.name: option.description for option in find_options("env", self.config_dirs)}
        description = described.get(self.env, "")
        with_agent = f"{description}; agent {self.agent}" if isinstance(self.agent, str) else description
        return EnvironmentInfo(self.name, with_agent, self._count())

    def get_env(
        self, *, selector: Selector, container_factory: ContainerFactory, tracker: Tracker | None = None
    ) -> Environment:
        """Makes the environment. Reads the task set.

        Args:
            selector: Picks tasks by their names.
            container_factory: Makes the containers.
            tracker: Receives every episode that ends.

        Raises:
            UserError: An option lacks a value or has a wrong one, the task set cannot be read, nothing is selected.
        """
        log_problems(self.config_dirs)
        config = self._compose()
        source = self._source(config)
        chosen = self.agent if callable(self.agent) else instantiate_group(config, "agent")
        names = selector(source.load(logger.warning))
        source.keep(names)
        parts = EpisodeParts(
            as_container_factory(container_factory),
            as_agent_factory(chosen),
            self.limits,
            seed=self.seed,
            provide_solution=self.provide_solution,
        )
        environment = TaskSamplingEnvironment(source, names, parts)
        if tracker is None:
            return environment
        from ares_exp.wrappers.tracked_environment import TrackedEnvironment

        return TrackedEnvironment(environment, tracker)

    def count_tasks(self) -> int | None:
        """Counts the tasks; `None` if that takes a network. Reads the task set.

        Raises:
            Exception: Whatever a source raises, a plugin's among them.
        """
        source = self._source(self._compose())
        return len(source.load(lambda warning: None)) if source.loads_offline else None

    def _compose(self) -> DictConfig:
        agent = [f"agent={self.agent}"] if isinstance(self.agent, str) else []
        return compose_config([f"env={self.env}", *agent, *self.overrides], config_dirs=self.config_dirs)

    def _source(self, config: DictConfig) -> SourceBase:
        from omegaconf import OmegaConf

        node: Any = config.env
        missing = sorted(OmegaConf.missing_keys(node) - {f"env.{name}" for name in self.options})
        if missing:
            needed = " ".join(f"{key}=…" for key in missing)
            given = ", ".join(f'"{key}=…"' for key in missing)
            raise PresetError(
                f"The preset `{self.name}` needs a value for {' and '.join(f'`{key}`' for key in missing)}. "
                f"Run `ares-exp env={self.env} {needed}`, or register a preset that says it: "
                f'`register_preset("NAME", ConfiguredPreset("{self.env}", overrides=({given},)))`.'
            )
        if not self.options:
            return make_scored_source(config)
        values: Any = OmegaConf.to_container(node, resolve=True)
        added = {"_target_", *added_defaults("env")}
        arguments = {key: value for key, value in values.items() if key not in added} | dict(self.options)
        return as_source(import_target(values["_target_"])(**arguments))

    def _count(self) -> int | None:
        try:
            return self.count_tasks()
        except (Exception, SystemExit) as error:  # a plugin's source may raise anything: the others are counted
            logger.debug("The tasks of %s cannot be counted: %s", self.name, error)
            return None
