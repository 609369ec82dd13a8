"""Presets, which create environments by name: `make("harbor:0")`, `info()`, `list_presets()`, and custom presets.

Every option of the `env` group is a preset, for example `harbor`, including options from plugins. To select an agent,
append the name of an option of the `agent` group: `harbor-shell`. `name:5`, `name:0:10`, `name:5:`, `name::10` and
`name@2/8` (the third of eight shards) select tasks. In Python, you can register more presets.

The environment of a preset is a `TaskSamplingEnvironment`, which chooses a task at each `reset()`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload, runtime_checkable

from ares_exp.agents.code_agent import CodeAgent, as_agent_factory
from ares_exp.cancellation import finish
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.options import find_options, log_problems
from ares_exp.config.parts import name_of
from ares_exp.config.targets import added_defaults, import_target, instantiate_group
from ares_exp.containers.container import ContainerFactory, as_container_factory
from ares_exp.environment import (
    Environment,
    EnvironmentBase,
    EnvironmentWrapper,
    EpisodeReport,
    LimitName,
    OneCallAtATime,
    TimeStep,
    complete,
    no_episode,
)
from ares_exp.environments.episode_limits import EpisodeLimits, limited
from ares_exp.environments.source import (
    EnvironmentSource,
    EpisodeParts,
    SourceBase,
    as_source,
    choose_index,
    make_scored_source,
)
from ares_exp.errors import ConfigError, EpisodeStateError, PresetError, PresetLookupError, close_matches
from ares_exp.runs.scheduler import episode_seed
from ares_exp.tasks.selection import parse_position

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ares_exp.trackers.tracker import Tracker
    from ares_exp.trajectories.collector import TrajectoryCollector


Selector = Callable[[Sequence[Any]], list[Any]]
"""Function that receives the tasks of a preset and returns the selected ones, in order. Raises `LookupError` if there
are none."""

RESERVED = ":@"
_ID = re.compile(
    r"(?P<name>[^:@]+)(?::(?P<position>[0-9]{1,18}|[0-9]{0,18}:[0-9]{0,18})|(?P<shard>@[0-9]{1,18}/[0-9]{1,18}))?"
)


@dataclass(frozen=True, slots=True)
class PresetId:
    """The parsed id of a preset, such as `harbor:0:10`: its name, and a selector of its tasks.

    `position` selects an index (`5`), a slice (`0:10`), a shard (`@2/8`), or all tasks (empty).
    """

    name: str
    position: str = ""

    @classmethod
    def parse(cls, text: str) -> PresetId:
        """Parses a preset id. Raises `PresetError` if the text is not a valid id."""
        match = _ID.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise PresetError(
                f"Expected a preset `name`, one of its tasks `name:5`, a slice `name:0:10`, `name:5:` or `name::10`, "
                f"or a shard `name@2/8`, without negative numbers, got {text!r:.200}."
            )
        found = cls(match["name"], match["position"] or match["shard"] or "")
        try:
            if found.position:
                parse_position(found.position)
        except ValueError as error:
            raise PresetError(f"`{found}`: {error}.") from None
        return found

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        """Returns the selected tasks, as a `Selector` does. Raises `PresetLookupError` if there are none."""
        try:
            picked = parse_position(self.position)(tasks) if self.position else list(tasks)
        except LookupError as error:
            raise PresetLookupError(f"`{self}`: {error}.") from None
        if not picked:
            raise PresetLookupError(f"`{self}`: the preset has no tasks.")
        return picked

    def __str__(self) -> str:
        """Returns the id in the form that `parse` reads."""
        return f"{self.name}{'' if self.position[:1] in ('', '@') else ':'}{self.position}"


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """The description of a preset for users.

    Attributes:
        name: Name for `make`.
        description: Description in one line.
        num_tasks: Number of tasks; `None` if it is unknown, for example because the count would require network access.
    """

    name: str
    description: str
    num_tasks: int | None

    def __str__(self) -> str:
        """Formats all fields in one line, as in `harbor (6 tasks): …`."""
        count = "an unknown number of" if self.num_tasks is None else str(self.num_tasks)
        return f"{self.name} ({count} task{'' if self.num_tasks == 1 else 's'}): {self.description}"


@dataclass(frozen=True)
class ConfiguredPreset:
    """A preset that creates environments from options of the config groups `env` and `agent`.

    ```python
    register_preset("mine", ConfiguredPreset("harbor", overrides=("env.path=path/to/tasks",)))
    ```

    Attributes:
        env: Option of the `env` group.
        agent: Option of the `agent` group, or a factory of agents; `None` for the default option.
        overrides: Further overrides, as on the command line: `env.path=…`, `agent.command_timeout_sec=…`.
        config_dirs: Folders with your options, as with `--config-dir`.
        options: Values for the keys of the `env` option, as Python objects.
        limits: Limits of an episode.
        seed: Seed for choosing tasks.
        provide_solution: Whether the task's solution is copied into the container.
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
        """Name of the preset: the name of the `env` option, with the suffix `-AGENT` if `agent` names an option."""
        return f"{self.env}-{self.agent}" if isinstance(self.agent, str) else self.env

    def get_info(self) -> EnvironmentInfo:
        """Returns the name, the description, and the number of tasks if it can be counted without network access."""
        described = {option.name: option.description for option in find_options("env", self.config_dirs)}
        description = described.get(self.env, "")
        with_agent = f"{description}; agent {self.agent}" if isinstance(self.agent, str) else description
        try:
            count = self.count_tasks()
        except (Exception, SystemExit) as error:  # a plugin may raise anything, and other presets are still counted
            logger.debug("The tasks of %s cannot be counted: %s", self.name, error)
            count = None
        return EnvironmentInfo(self.name, with_agent, count)

    def get_env(
        self, *, selector: Selector, container_factory: ContainerFactory, tracker: Tracker | None = None
    ) -> Environment:
        """Reads the task set and creates the environment; see `EnvironmentSpec.get_env`.

        Raises:
            UserError: An option is missing or invalid, the task set cannot be read, or no task is selected.
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
        """Counts the tasks; `None` if this needs network access. Raises any exception of the task source."""
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
                f"The preset `{self.name}` needs a value for "
                f"{' and '.join(f'`{key}`' for key in missing)}. Run `ares-exp env={self.env} {needed}`, "
                'or register a preset with this value: `register_preset("NAME", '
                f'ConfiguredPreset("{self.env}", overrides=({given},)))`.'
            )
        if not self.options:
            return make_scored_source(config)
        values: Any = OmegaConf.to_container(node, resolve=True)
        added = {"_target_", *added_defaults("env")}
        arguments = {key: value for key, value in values.items() if key not in added} | dict(self.options)
        return as_source(import_target(values["_target_"])(**arguments))


_ENV_NAME = re.compile(r"[\w.]+")
"""Pattern of the names of `env` options that are presets. They have no hyphen, so that `ENV-AGENT` is unambiguous."""


@runtime_checkable
class EnvironmentSpec(Protocol):
    """The interface of a preset, which describes and creates an environment."""

    def get_info(self) -> EnvironmentInfo:
        """Returns the name, description and number of tasks, without creating the environment."""
        ...

    def get_env(
        self, *, selector: Selector, container_factory: ContainerFactory, tracker: Tracker | None = None
    ) -> Environment:
        """Creates the environment.

        Args:
            selector: Function that selects the tasks to run: `selector(tasks) -> list`.
            container_factory: Factory of the containers.
            tracker: Tracker that receives every ended episode, or `None`.
        """
        ...


F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[str, EnvironmentSpec] = {}


def make(
    preset_id: str,
    *,
    container_factory: ContainerFactory | None = None,
    tracker: Tracker | None = None,
    trajectory_collector: TrajectoryCollector | Mapping[str, TrajectoryCollector] | None = None,
) -> Environment:
    """Reads the task set of a preset and creates its environment. Nothing is started before the first `reset()`.

    Args:
        preset_id: Name of the preset, optionally with a selector of its tasks: `name`, `name:5`, `name:0:10`,
            `name:5:`, `name::10`, `name@2/8`.
        container_factory: Factory of the containers, which the caller must close; `None` for local containers.
        tracker: Tracker that receives every ended episode. The caller starts and finishes it.
        trajectory_collector: Collector that records every episode, or several collectors by name.

    Returns:
        The preset's environment. With a collector, it is wrapped in a `TrajectoryCollectingEnvironment`.

    Raises:
        ValueError: The preset or its selector is malformed, or the preset lacks a value (`PresetError`).
        LookupError: The preset does not exist, an index is out of range, or no task is selected (`PresetLookupError`).
        UserError: The options of the preset are invalid, or its task set cannot be read.
    """
    asked = PresetId.parse(preset_id)
    spec = find_preset(asked.name)
    if container_factory is None:
        from ares_exp.containers.local import LocalContainerFactory

        container_factory = LocalContainerFactory()
    environment = spec.get_env(selector=asked, container_factory=container_factory, tracker=tracker)
    if trajectory_collector is None:
        return environment
    from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment

    return TrajectoryCollectingEnvironment(environment, trajectory_collector)


@overload
def info(preset_id: None = None) -> list[EnvironmentInfo]: ...


@overload
def info(preset_id: str) -> EnvironmentInfo: ...


def info(preset_id: str | None = None) -> EnvironmentInfo | list[EnvironmentInfo]:
    """Returns the description of a preset, or of every preset if no id is given.

    Args:
        preset_id: Id as for `make`. Its selector is ignored, so `num_tasks` is the number of all tasks of the preset.

    Raises:
        ValueError, LookupError: See `make`.
    """
    if preset_id is None:
        return [_info(name) for name in list_presets()]
    return _info(PresetId.parse(preset_id).name)


def list_presets() -> list[str]:
    """Returns the names of all presets, sorted. Names that include an agent (`harbor-shell`) are omitted."""
    log_problems()
    return sorted({*_registered, *_configured()})


def register_preset(name: str, spec: EnvironmentSpec) -> None:
    """Adds a preset, which `make` and `info` then find in this process.

    Args:
        name: Name for `make`.
        spec: Object with `get_info()` and `get_env(*, selector, container_factory, tracker=None)`.

    Raises:
        ValueError: The name is taken, empty, or contains `:`, `@` or surrounding spaces, or the spec lacks a method
            (`PresetError`).
    """
    if not isinstance(name, str) or not name or name != name.strip() or any(char in name for char in RESERVED):
        raise PresetError(
            f"Expected the name of a preset, without `:` and `@` and without spaces around it, got {name!r:.200}."
        )
    if isinstance(spec, type) or not isinstance(spec, EnvironmentSpec):
        got = f"the class {spec.__name__}" if isinstance(spec, type) else type(spec).__name__
        raise PresetError(
            f"Expected an object with `get_info()` and `get_env(…)` as the preset `{name}`, got {got}. To register a "
            f'function, use `@register_env(name="{name}")`.'
        )
    if name in _registered or _configured_preset(name) is not None:
        raise PresetError(f"The preset `{name}` already exists. Use another name.")
    _registered[name] = spec


def register_env(
    *, name: str | None = None, description: str | None = None, num_tasks: int | None = None
) -> Callable[[F], F]:
    """Registers the decorated function as a preset. It must accept the arguments of `EnvironmentSpec.get_env`.

    Args:
        name: Name for `make`; by default the function's name.
        description: Description in one line; by default the first line of the function's docstring.
        num_tasks: Number of tasks; `None` if unknown.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ValueError: See `register_preset`.
    """

    def register(function: F) -> F:
        preset = name_of(function) if name is None else name
        about = (inspect.getdoc(function) or "").partition("\n")[0] if description is None else description
        register_preset(preset, _FunctionSpec(EnvironmentInfo(preset, about, num_tasks), function))
        return function

    return register


@dataclass(frozen=True, slots=True)
class _FunctionSpec:
    about: EnvironmentInfo
    function: Callable[..., Environment]

    def get_info(self) -> EnvironmentInfo:
        return self.about

    def get_env(
        self, *, selector: Selector, container_factory: ContainerFactory, tracker: Tracker | None = None
    ) -> Environment:
        return self.function(selector=selector, container_factory=container_factory, tracker=tracker)


def _info(name: str) -> EnvironmentInfo:
    return replace(find_preset(name).get_info(), name=name)


def find_preset(name: str) -> EnvironmentSpec:
    """Returns the preset with this name. Raises `PresetLookupError` if the name is unknown."""
    spec = _registered[name] if name in _registered else _configured_preset(name)
    if spec is not None:
        return spec
    known = list_presets()
    if name in {option.name for option in find_options("env")}:
        raise PresetLookupError(
            f"`env={name}` is not a preset, because its name has a character other than letters, digits, `_` and `.`. "
            "Rename its file, or use `register_preset` with another name."
        )
    env, _, agent = name.partition("-")
    if agent and env in _configured():
        agents = [option.name for option in find_options("agent")]
        close = close_matches(agent, agents) or f" Agents: {', '.join(agents)}."
        raise PresetLookupError(f"There is no preset `{name:.200}`, because there is no agent `{agent:.200}`.{close}")
    raise PresetLookupError(
        f"There is no preset `{name:.200}`.{close_matches(name, known)} Presets: {', '.join(known)}."
    )


def _configured() -> list[str]:
    return [option.name for option in find_options("env") if _ENV_NAME.fullmatch(option.name)]


def _configured_preset(name: str) -> ConfiguredPreset | None:
    """Creates the preset with the name `ENV` or `ENV-AGENT`; `None` if one of these options does not exist."""
    env, hyphen, agent = name.partition("-")
    if env not in _configured():
        return None
    if not hyphen:
        return ConfiguredPreset(env)
    return ConfiguredPreset(env, agent) if agent in {option.name for option in find_options("agent")} else None


class TaskSamplingEnvironment(EnvironmentWrapper):
    """Runs tasks of a source. For each episode, the source creates a new environment.

    The first `reset()` checks that the container backend works and can run the tasks.

    Attributes:
        task_names: Names of the tasks from which `reset()` chooses.
        attempt: Number of the current attempt at the task, starting at 0. `reset(seed=…)` resets the numbers of all
            tasks.
        episode_seed: Seed of the episode. A run with the same `seed` uses the same value for the same attempt at the
            task.
    """

    def __init__(self, source: EnvironmentSource, task_names: Sequence[str], parts: EpisodeParts) -> None:
        """Creates the environment, without starting anything.

        Args:
            source: Source that has loaded its tasks. This environment closes it.
            task_names: Names of the tasks from which `reset()` chooses.
            parts: Containers, agent and limits of the episodes. `parts.seed` is the seed for the choice of tasks.

        Raises:
            ConfigError: `task_names` is empty.
        """
        if not task_names:
            raise ConfigError("Expected at least one task for the environment, got none.")
        super().__init__(_NotReset())
        self.task_names = tuple(task_names)
        self.attempt = 0
        self.episode_seed = 0
        self._source = as_source(source)
        self._parts = parts
        self._task_name: str | None = None
        self._checked = False
        self._closed = 0
        self._calls = OneCallAtATime()
        self._reseed(parts.seed)

    @property
    def current_task(self) -> Any:
        """The task of the episode, or only its name if the environment has no task object; `None` before `reset()`."""
        return super().current_task or self._task_name

    def report(self) -> EpisodeReport:
        """Returns the report of the episode's environment, and adds the task, the attempt and the seed."""
        report = super().report()
        if self._task_name is None:
            return report
        name = report.task_name or self._task_name
        return replace(report, task_name=name, seed=self.episode_seed, attempt=self.attempt)

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode. If an episode is running, abandons it.

        Args:
            seed: New seed for choosing tasks and for seeding episodes.
            options: `{"task": name_or_index}` selects the task.

        Raises:
            UserError: The container backend does not work or cannot run the tasks, or the task does not exist.
            EpisodeError: The episode could not start. All of its resources were released.
        """
        with self._calls.during("reset()"):
            closed = self._closed
            await self._check()
            await self._env.close()
            if closed != self._closed:
                raise EpisodeStateError("The environment was closed while reset() was running.")
            self._env = complete(_NotReset())
            self._task_name = None
            if seed is not None:
                self._reseed(seed)
            name = self.task_names[choose_index(self.task_names, options or {}, self._random)]
            self.attempt, self._ran[name] = self._ran[name], self._ran[name] + 1
            self.episode_seed = episode_seed(self._seed, name, self.attempt)
            self._task_name = name
            parts = replace(self._parts, seed=self.episode_seed)
            self._env = limited(self._source.make(name, parts), parts.limits)
            try:
                return await self._env.reset()
            except BaseException:
                await finish(self._env.close())
                raise

    async def step(self, action: Any) -> TimeStep[Any]:
        """Steps the episode's environment. Raises its errors, or `EpisodeStateError` before `reset()`."""
        with self._calls.during("step()"):
            return await self._env.step(action)

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Ends the episode because of `limit`. Returns `None` if the episode's environment does not support this."""
        with self._calls.during("truncate()"):
            return await super().truncate(limit)

    async def close(self) -> None:
        """Closes the environment of the episode and the source of the tasks. Idempotent."""
        self._closed += 1
        try:
            await self._env.close()
        finally:
            await self._source.close()

    __aenter__ = EnvironmentBase.__aenter__
    __aexit__ = EnvironmentBase.__aexit__

    def _reseed(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._ran: Counter[str] = Counter()

    async def _check(self) -> None:
        """Checks that the task source, the containers and the agent work. Does nothing after the first success."""
        if self._checked:
            return
        await self._source.preflight()
        if self._source.needs_container:
            await self._parts.container_factory.preflight()
            await self._parts.code_agent_factory.preflight()
        await asyncio.to_thread(self._source.check, self._parts, report=logger.warning)
        self._checked = True


class _NotReset:
    async def reset(self) -> TimeStep[Any]:
        raise no_episode(ended=False)

    async def step(self, action: Any) -> TimeStep[Any]:
        raise no_episode(ended=False)

    async def close(self) -> None:
        """Does nothing, because the placeholder has no resources."""
