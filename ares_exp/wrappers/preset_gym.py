"""`PresetGym`, a `gymnasium.Env` that runs the tasks of a preset. Gymnasium creates it for all ids of this package."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec

import pydantic

from ares_exp.agents.code_agent import CodeAgent
from ares_exp.config.targets import import_target, option_targets
from ares_exp.containers.container import ContainerFactory, ContainerFactoryBase, as_container_factory
from ares_exp.environments.episode_limits import EpisodeLimits, TimeLimits
from ares_exp.errors import ConfigError, PresetError, UserError, close_matches
from ares_exp.llms.response import LLMResponse
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.collectors import JsonTrajectoryCollector
from ares_exp.wrappers.async_gym import GymStep
from ares_exp.wrappers.registry import ConfiguredPreset, PresetId, find_preset
from ares_exp.wrappers.sync_gym import GymWrapper

P = ParamSpec("P")
AtLeastOne = Annotated[int, pydantic.Field(ge=1)]
Positive = Annotated[float, pydantic.Field(gt=0)]


def container_factory(value: Any) -> ContainerFactoryBase:
    """Converts the argument `container`, the name of an option or a factory, to a container factory."""
    if isinstance(value, ContainerFactory):
        return as_container_factory(value)
    targets = option_targets("container")
    if value not in targets:
        names = ", ".join(map(repr, targets))
        raise ValueError(f"expected {names} or a container factory, got {value!r:.80}")
    return as_container_factory(import_target(targets[value])())


def _checked_agent(value: Any) -> Any:
    names = option_targets("agent")
    if value is None or callable(value) or (isinstance(value, str) and value in names):
        return value
    raise ValueError(f"expected {', '.join(map(repr, names))} or a factory of agents, got {value!r:.80}")


def _explained(init: Callable[Concatenate[PresetGym, P], None]) -> Callable[Concatenate[PresetGym, P], None]:
    """Decorates `init`, so that invalid arguments raise one readable `ConfigError` instead of pydantic's errors."""

    @functools.wraps(init)
    def checked(self: PresetGym, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            init(self, *args, **kwargs)
        except PresetError:
            raise
        except UserError as error:  # the message names keys such as `env.path`, which here are arguments
            error.args = tuple(re.sub(r"\benv\.(?=[a-z])", "", str(one)) for one in error.args)
            raise
        except pydantic.ValidationError as error:
            problems = [_problem(item, kwargs) for item in error.errors(include_url=False)]
            said = "; ".join(problems)
            end = "" if said.endswith(("?", ".")) else "."
            preset = kwargs.get("preset", "PresetGym")
            raise ConfigError(f"{preset} cannot be created: {said}{end}") from None

    return checked


def _problem(item: Any, given: Mapping[str, Any]) -> str:
    text = item["msg"].removeprefix("Value error, ")
    if item["type"] == "unexpected_keyword_argument":
        name = str(item["loc"][-1])
        target = option_targets("env").get(str(given.get("preset", "")))
        makers: list[Any] = [PresetGym, *([import_target(target)] if target is not None else [])]
        known = [argument for make in makers for argument in inspect.signature(make).parameters]
        return f"there is no argument `{name}`.{close_matches(name, known)}"
    got = "" if "got " in text or item["type"].startswith("missing") else f" (got {item['input']!r:.80})"
    return f"`{'.'.join(map(str, item['loc']))}`: {text}{got}"


class PresetGym(GymWrapper):
    """A `gymnasium.Env` that runs the tasks of a preset; see `GymWrapper`.

    The constructor reads the task set, but does not start anything. The first `reset` checks that the container backend
    works and can run the tasks. Vector environments with worker processes need a factory that can be pickled:
    `functools.partial(PresetGym, preset="harbor", path=…)`.
    """

    @_explained
    @pydantic.validate_call(config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    def __init__(
        self,
        /,
        *,
        preset: str,
        container: Annotated[str | ContainerFactory, pydantic.PlainValidator(container_factory)] = "local",
        agent: Annotated[str | Callable[..., CodeAgent] | None, pydantic.PlainValidator(_checked_agent)] = None,
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
        """Reads the task set, without starting anything.

        Args:
            preset: A preset as for `ares_exp.make`: an option of `env`, or a registered preset, optionally with a
                selector (`name:5`, `name:0:10`, `name@2/8`). A registered preset that is not a `ConfiguredPreset`
                supports none of the arguments `agent`, `provide_solution`, `seed` and `options`, and no limits.
            container: Name of an option of the `container` group (`"local"`, `"docker"`), or a factory that the caller
                must close.
            agent: Name of an option of the `agent` group (`"shell"`, `"tools"`), or a factory of code agents; `None`
                for the default.
            step_limit: Number of LLM responses after which the episode is truncated. The tests then run on the current
                state of the container, unlike after Gymnasium's `max_episode_steps`.
            token_limit: Limit on the prompt and generated tokens of an episode.
            cost_limit: Limit on the cost of an episode in US dollars.
            agent_timeout_sec: Time limit of the agent in seconds. It replaces the time limits of the tasks.
            verify_on_truncation: Whether the tests run after a truncated episode.
            provide_solution: Whether the task's solution is copied into the container, for a policy that runs it.
            seed: Seed for the choice of tasks. `reset(seed=…)` replaces it.
            trajectory_dir: Directory where every episode is stored as a JSON file.
            collector: Custom collector of the episodes.
            render_mode: With `"ansi"`, `render()` returns the last response and the next observation as text.
            allow_running_loop: Whether calls inside a running event loop may block the loop. Set it in notebooks.
            options: Values for the keys of the `env` option.

        Raises:
            ConfigError: An argument has an invalid value, or no task is selected.
            ValueError, LookupError, UserError: See `ares_exp.make`.
        """
        if trajectory_dir is not None and collector is not None:
            raise ConfigError("Expected `trajectory_dir` or `collector`, got both. A collector sets its own directory.")
        asked = PresetId.parse(preset)
        spec = find_preset(asked.name)
        limits = EpisodeLimits(
            steps=step_limit,
            tokens=token_limit,
            cost=cost_limit,
            time=TimeLimits(agent_timeout_sec=agent_timeout_sec),
            verify_on_truncation=verify_on_truncation,
        )
        if isinstance(spec, ConfiguredPreset):
            spec = replace(
                spec,
                agent=spec.agent if agent is None else agent,
                options=options,
                limits=limits,
                seed=seed,
                provide_solution=provide_solution,
            )
        elif options or agent is not None or limits != EpisodeLimits() or seed or provide_solution:
            raise ConfigError(
                f"The preset `{asked.name}` was registered in Python, so it does not support the arguments `agent`, "
                "`seed` and `provide_solution`, limits of the episode, or options of `env`. Remove these arguments."
            )
        environment = spec.get_env(selector=asked, container_factory=container_factory(container))
        if trajectory_dir is not None:
            collector = JsonTrajectoryCollector(trajectory_dir)
        if collector is not None:
            environment = TrajectoryCollectingEnvironment(environment, collector)
        super().__init__(environment, render_mode=render_mode, allow_running_loop=allow_running_loop)

    def step(self, action: LLMResponse) -> GymStep:  # type: ignore[override]
        """Applies `action`; see `GymWrapper.step`. Raises `TypeError` for `None`, which would mean a timeout."""
        if action is None:
            raise TypeError("Expected an LLMResponse as the action, got None. Use `LLMResponse.from_text(text)`.")
        return super().step(action)
