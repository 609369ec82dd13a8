"""`HarborGym`: Harbor tasks as a `gymnasium.Env`, from plain arguments. It is what `ares_exp/Harbor-v0` makes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar

import pydantic

from ares_exp.agents.code_agent import CodeAgent
from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import ContainerFactory
from ares_exp.containers.daytona import DaytonaContainerFactory
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.environment import Environment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import ConfigError
from ares_exp.llms.request import LLMRequest
from ares_exp.tasks.time_limits import TimeLimits
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.wrappers.async_gym import Info
from ares_exp.wrappers.gym import GymWrapper

logger = logging.getLogger(__name__)

P = ParamSpec("P")
SelfT = TypeVar("SelfT")
Entry = int | str
AtLeastOne = Annotated[int, pydantic.Field(ge=1)]
Positive = Annotated[float, pydantic.Field(gt=0)]

_CONTAINERS: dict[str, Callable[[], ContainerFactory]] = {
    "local": LocalContainerFactory,
    "docker": DockerContainerFactory,
    "daytona": DaytonaContainerFactory,
}


def _container_factory(value: Any) -> ContainerFactory:
    made = _CONTAINERS[value]() if isinstance(value, str) and value in _CONTAINERS else value
    if not isinstance(made, ContainerFactory):
        raise ValueError(f"expected 'local', 'docker', 'daytona' or a container factory, got {value!r:.80}")
    return made


def _explained(init: Callable[Concatenate[SelfT, P], None]) -> Callable[Concatenate[SelfT, P], None]:
    """Turns pydantic's report on wrong arguments into one paragraph."""

    @functools.wraps(init)
    def checked(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            init(self, *args, **kwargs)
        except pydantic.ValidationError as error:
            problems = []
            for item in error.errors(include_url=False):
                text = item["msg"].removeprefix("Value error, ")
                got = "" if "got " in text else f" (got {item['input']!r:.80})"
                problems.append(f"`{'.'.join(map(str, item['loc']))}`: {text}{got}")
            raise ConfigError(f"ares_exp/Harbor-v0 cannot be made: {'; '.join(problems)}.") from None

    return checked


class HarborGym(GymWrapper):
    """Plays Harbor tasks; see `GymWrapper`.

    Making one reads the task set and starts nothing. The first `reset` checks that the container backend works and can
    play the tasks. `functools.partial(HarborGym, path=…)` is a factory that can be pickled, for worker processes.
    """

    @_explained
    @pydantic.validate_call(config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    def __init__(
        self,
        *,
        path: Path | None = None,
        tasks: Entry | list[Entry] | None = None,
        exclude: str | list[str] | None = None,
        limit: AtLeastOne | None = None,
        reward_key: str | None = None,
        container: Annotated[str | ContainerFactory, pydantic.PlainValidator(_container_factory)] = "local",
        agent: Callable[..., CodeAgent] | None = None,
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
    ) -> None:
        """Reads the task set.

        Args:
            path: A folder of tasks, or one task; `None` for the bundled samples.
            tasks: Which of them: names, globs, indexes (`5`), slices (`0:10`), shards (`@2/8`); `None` for all.
            exclude: Names or globs to leave out.
            limit: At most so many, the first ones.
            reward_key: Which key of `reward.json` is the reward, where there are several and none is `reward`.
            container: `"local"`, `"docker"`, or a factory with options of your own, which stays yours to close.
            agent: Makes the code agent; `None` for the shell agent.
            step_limit: LLM responses after which the verifier scores what there is, and the episode is truncated.
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

        Raises:
            ConfigError: An argument has a wrong value, or nothing is selected.
            TaskError: `path` holds no valid task.
        """
        if trajectory_dir is not None and collector is not None:
            raise ConfigError("Expected `trajectory_dir` or `collector`, got both. A collector knows its own place.")
        self._source = HarborEnvironments(path=path, tasks=tasks, exclude=exclude, limit=limit, reward_key=reward_key)
        self._source.load(logger.warning)
        self._agents = agent or ShellAgentFactory()
        self._containers = _container_factory(container)
        self._provide_solution = provide_solution
        self._limits = EpisodeLimits(
            steps=step_limit,
            tokens=token_limit,
            cost=cost_limit,
            time=TimeLimits(agent_timeout_sec=agent_timeout_sec),
            verify_on_truncation=verify_on_truncation,
        )
        self._checked = False
        environment: Environment = CodeEnvironment(
            self._source.tasks,
            container_factory=self._containers,
            code_agent_factory=self._agents,
            limits=self._limits,
            seed=seed,
            provide_solution=provide_solution,
        )
        if trajectory_dir is not None:
            collector = JsonTrajectoryCollector(trajectory_dir)
        if collector is not None:
            environment = TrajectoryCollectingEnvironment(environment, collector)
        super().__init__(environment, render_mode=render_mode, allow_running_loop=allow_running_loop)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[LLMRequest, Info]:
        """Starts an episode; see `GymWrapper.reset`.

        Raises:
            PreflightError: The container backend does not work here.
            UnsupportedTaskError: It cannot play some of the tasks; named with the reasons.
        """
        if not self._checked:
            self._run(self._check)
            self._checked = True
        return super().reset(seed=seed, options=options)

    async def _check(self) -> None:
        await self._containers.preflight()
        if (agent_preflight := getattr(self._agents, "preflight", None)) is not None:
            await agent_preflight()
        parts = EpisodeParts(
            container_factory=self._containers,
            code_agent_factory=self._agents,
            limits=self._limits,
            seed=0,
            provide_solution=self._provide_solution,
        )
        self._source.check(parts, report=logger.warning)
