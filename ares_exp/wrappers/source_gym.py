"""`SourceGym`: what an environment source plays as a `gymnasium.Env`, from plain arguments."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar

import pydantic

from ares_exp.agents.code_agent import CodeAgent, as_agent_factory
from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.config.targets import import_target, option_targets
from ares_exp.containers.container import ContainerFactory, ContainerFactoryBase, as_container_factory
from ares_exp.environment import Environment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EnvironmentSource, EpisodeParts
from ares_exp.errors import ConfigError, UserError, close_matches
from ares_exp.presets.task_sampling_environment import TaskSamplingEnvironment
from ares_exp.tasks.time_limits import TimeLimits
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.wrappers.gym import GymWrapper

logger = logging.getLogger(__name__)

P = ParamSpec("P")
SelfT = TypeVar("SelfT", bound=GymWrapper)
AtLeastOne = Annotated[int, pydantic.Field(ge=1)]
Positive = Annotated[float, pydantic.Field(gt=0)]


def container_factory(value: Any) -> ContainerFactoryBase:
    """Converts the argument `container` to a factory, for pydantic.

    Raises:
        ValueError: The value names no container factory.
    """
    if isinstance(value, ContainerFactory):
        return as_container_factory(value)
    targets = option_targets("container")
    if value not in targets:
        names = ", ".join(map(repr, targets))
        raise ValueError(f"expected {names} or a container factory, got {value!r:.80}")
    return as_container_factory(import_target(targets[value])())


def agent_factory(value: Any) -> Callable[..., CodeAgent]:
    """Converts the argument `agent` to a factory, for pydantic.

    Raises:
        ValueError: The value makes no agents.
    """
    targets = option_targets("agent")
    if isinstance(value, str) and value in targets:
        value = import_target(targets[value])()
    if value is None:
        value = ShellAgentFactory()
    if not callable(value):
        names = ", ".join(map(repr, targets))
        raise ValueError(f"expected {names} or a factory of agents, got {value!r:.80}")
    made: Callable[..., CodeAgent] = value
    return made


def explained(init: Callable[Concatenate[SelfT, P], None]) -> Callable[Concatenate[SelfT, P], None]:
    """Turns pydantic's report on wrong arguments into one paragraph."""

    @functools.wraps(init)
    def checked(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            init(self, *args, **kwargs)
        except UserError as error:
            if isinstance(self, SourceGym):
                error.args = tuple(_as_arguments(one) for one in error.args)
            raise
        except pydantic.ValidationError as error:
            problems = []
            for item in error.errors(include_url=False):
                text = item["msg"].removeprefix("Value error, ")
                if item["type"] == "unexpected_keyword_argument":
                    problems.append(f"there is no argument `{item['loc'][-1]}`.{_near(type(self), item['loc'][-1])}")
                    continue
                got = "" if "got " in text or item["type"].startswith("missing") else f" (got {item['input']!r:.80})"
                problems.append(f"`{'.'.join(map(str, item['loc']))}`: {text}{got}")
            said = "; ".join(problems)
            end = "" if said.endswith(("?", ".")) else "."
            raise ConfigError(f"{type(self).__name__} cannot be made: {said}{end}") from None

    return checked


def _as_arguments(message: Any) -> Any:
    """Names the keys of `env` in a message as the arguments that they are here: `path=` for `env.path=`."""
    return re.sub(r"\benv\.(?=[a-z])", "", message) if isinstance(message, str) else message


def _near(kind: type[Any], name: object) -> str:
    """Returns the arguments that `name` may have meant, as a sentence behind a space."""
    makers: list[Callable[..., Any]] = [kind, kind.source] if issubclass(kind, SourceGym) else [kind]
    return close_matches(str(name), [name for make in makers for name in inspect.signature(make).parameters])


class SourceGym(GymWrapper):
    """Plays the tasks of a source; see `GymWrapper`.

    Making one reads the task set and starts nothing. The first `reset` checks that the container backend works and can
    play the tasks. `functools.partial(HarborGym, path=…)` is a factory that can be pickled, for worker processes.

    Attributes:
        source: Makes the source, from the options that it has in the config: `conf/env/`.
    """

    source: ClassVar[Callable[..., EnvironmentSource]]

    @explained
    @pydantic.validate_call(config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    def __init__(
        self,
        /,
        *,
        container: Annotated[str | ContainerFactory, pydantic.PlainValidator(container_factory)] = "local",
        agent: Annotated[str | Callable[..., CodeAgent] | None, pydantic.PlainValidator(agent_factory)] = None,
        step_limit: AtLeastOne | None = None,
        token_limit: AtLeastOne | None = None,
        cost_limit: Positive | None = None,
        agent_timeout_sec: Positive | None = None,
        verify_on_truncation: bool = True,
        provide_solution: bool = False,
        seed: int = 0,
        trajectory_dir: Path | None = None,
        collector: TrajectoryCollector | None = None,
        render_mode: Literal["ansi"] | None = None,
        allow_running_loop: bool = False,
        **options: Any,
    ) -> None:
        """Reads the task set; starts nothing.

        Args:
            container: An option of the `container` group (`"local"`, `"docker"`), or a factory with options of your
                own, which stays yours to close.
            agent: An option of the `agent` group (`"shell"`, `"tools"`), or what makes the code agent; `None` for the
                shell agent.
            step_limit: LLM responses after which the verifier scores the current state, and the episode is truncated.
                Gymnasium's `max_episode_steps` cuts it without a verdict.
            token_limit: Prompt and generated tokens of an episode, likewise.
            cost_limit: US dollars of an episode, likewise.
            agent_timeout_sec: Replaces the tasks' own limit on the agent.
            verify_on_truncation: Whether a truncated episode is scored.
            provide_solution: Whether the task's solution goes into the container (for an oracle).
            seed: Of the choice of tasks until `reset(seed=…)` gives another.
            trajectory_dir: Keeps every episode as a JSON file there.
            collector: Keeps every episode in another way.
            render_mode: `"ansi"`: `render()` gives the last exchange as text.
            allow_running_loop: Whether calls inside a running event loop may block it. For notebooks.
            options: What is played: the source's own arguments.

        Raises:
            ConfigError: An argument has a wrong value, or nothing is selected.
            UserError: The task set cannot be read.
        """
        if trajectory_dir is not None and collector is not None:
            raise ConfigError("Expected `trajectory_dir` or `collector`, got both. A collector knows its own place.")
        source = self.source(**options)
        names = source.load(logger.warning)
        limits = EpisodeLimits(
            steps=step_limit,
            tokens=token_limit,
            cost=cost_limit,
            time=TimeLimits(agent_timeout_sec=agent_timeout_sec),
            verify_on_truncation=verify_on_truncation,
        )
        parts = EpisodeParts(
            container_factory=container_factory(container),
            code_agent_factory=as_agent_factory(agent_factory(agent)),
            limits=limits,
            seed=seed,
            provide_solution=provide_solution,
        )
        environment: Environment = TaskSamplingEnvironment(source, names, parts)
        if trajectory_dir is not None:
            collector = JsonTrajectoryCollector(trajectory_dir)
        if collector is not None:
            environment = TrajectoryCollectingEnvironment(environment, collector)
        super().__init__(environment, render_mode=render_mode, allow_running_loop=allow_running_loop)
