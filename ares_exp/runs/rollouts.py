"""The function `rollouts`, which yields finished episodes to your own Python loop and writes nothing to the disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.agents.code_agent import as_agent_factory
from ares_exp.cancellation import cancel_all, finish
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.overrides import key_set_by, parse_overrides
from ares_exp.config.parts import name_of
from ares_exp.config.schema import KEYS, validate
from ares_exp.config.targets import SCORER, instantiate_group
from ares_exp.containers.container import as_container_factory
from ares_exp.environment import EnvironmentWrapper, MinimalEnvironment, TimeStep, complete, takes_seed
from ares_exp.environments.source import (
    EnvironmentSource,
    EpisodeParts,
    Report,
    SourceBase,
    as_source,
    make_scored_source,
)
from ares_exp.errors import ConfigError
from ares_exp.policies.policy import as_policy
from ares_exp.records.results import EpisodeResult, EpisodeUsage, ErrorInfo, Outcome
from ares_exp.runs.components import Components, Settings, bounded_concurrency, close_all, planned_episodes, prepare
from ares_exp.runs.running_episode import EpisodeMaker, RunningEpisode
from ares_exp.runs.scheduler import PlannedEpisode
from ares_exp.trackers.tracker import SeveralTrackers
from ares_exp.trajectories.collectors import MemoryTrajectoryCollector
from ares_exp.trajectories.records import EpisodeTrajectory

if TYPE_CHECKING:
    from ares_exp.agents.code_agent import CodeAgentFactory
    from ares_exp.containers.container import ContainerFactory
    from ares_exp.llms.request import LLMClient


EPISODE_KEYS = ("limits", "timeouts", "verify_on_truncation")
"""Top-level config keys that `rollouts` accepts as overrides, because they apply to single episodes."""
RELEASE_LIMIT_SEC = 60.0
"""Maximum time, in seconds, that cancelled episodes get to release their containers."""

logger = logging.getLogger(__name__)


class MadeEnvironments(SourceBase):
    """A source that creates environments by calling a function. It has a single task with the function's name."""

    path = None
    needs_container = False

    def __init__(self, make: Callable[[], MinimalEnvironment]) -> None:
        self._make = make

    def load(self, report: Report) -> Sequence[str]:
        """Returns the name of the single task."""
        name = name_of(self._make)
        return ["environment" if name == "<lambda>" else name]

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Accepts everything, because the requirements of the function are unknown."""

    def make(self, task_name: str, parts: EpisodeParts) -> EnvironmentWrapper:
        """Calls the function to create an environment. Raises `TypeError` if the result is not an environment."""
        made = self._make()
        if not isinstance(made, MinimalEnvironment):
            raise TypeError(
                f"Expected {name_of(self._make)}() to make an environment with `reset`, `step` and `close`, got "
                f"{type(made).__name__}."
            )
        return _Seeded(made, parts.seed)


class _Seeded(EnvironmentWrapper):
    """A wrapper that passes the episode's seed to the first `reset`, if the environment's `reset` accepts one."""

    def __init__(self, env: MinimalEnvironment, seed: int) -> None:
        super().__init__(env)
        self._seed = seed if takes_seed(env) else None

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        first, self._seed = self._seed, None
        return await super().reset(seed=first if seed is None else seed, options=options)


def _make_parts(
    given: Mapping[str, Any], values: Mapping[str, Any], overrides: Sequence[str], config_dirs: Sequence[Path]
) -> tuple[Components, Settings, dict[str, Callable[[], Awaitable[None]]]]:
    """Creates the components (without starting them), the settings, and the functions that close the components.

    `given` contains an object, the name of an option, the content of an option file or `None` (the default option) for
    each config group. Objects belong to the caller and are not closed.

    Raises:
        ConfigError: An argument is invalid.
    """
    from omegaconf import OmegaConf, open_dict

    if isinstance(overrides, str):
        raise ConfigError(f'Expected a list of overrides such as `["limits.steps=20"]`, got {overrides!r:.200}.')
    chosen = [f"{group}={part}" for group, part in given.items() if isinstance(part, str)]
    own = [f"{name}={value}" for name, value in values.items()]
    _check_overrides(overrides, given, values)
    config = compose_config([*chosen, *own, *overrides], config_dirs=config_dirs)
    for group, part in given.items():
        if isinstance(part, Mapping):
            with open_dict(config):
                OmegaConf.update(config, group, dict(part), merge=False)
    resolved = {name: config[name] for name in KEYS}
    validate(resolved)
    objects = {group: part for group, part in given.items() if not (part is None or isinstance(part, str | Mapping))}

    def make(group: str) -> Any:
        return objects[group] if group in objects else instantiate_group(config, group)

    parts = Components(
        source=_source(objects["env"]) if "env" in objects else make_scored_source(config),
        agent_factory=as_agent_factory(make("agent")),
        container_factory=as_container_factory(make("container")),
        policy=as_policy(make("policy")),
        wrapper=complete,
        collectors={"memory": MemoryTrajectoryCollector(keep=1)},
        tracker=SeveralTrackers({}),
    )
    closing = {"policy": parts.policy.close, "env": parts.source.close, "container": parts.container_factory.close}
    return parts, Settings.of(resolved), {group: close for group, close in closing.items() if group not in objects}


def _check_overrides(overrides: Sequence[str], given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if an override would have no effect. Ignores syntax errors, which Hydra reports later."""
    from hydra.errors import OverrideParseException

    try:
        parsed = parse_overrides(overrides)
    except OverrideParseException:
        return
    for override in parsed:
        key = key_set_by(override)
        group = key.partition(".")[0].partition("/")[0]
        if group in values:
            raise ConfigError(f"`{group}` is an argument of `rollouts`. Pass `{group}=…` outside of `overrides`.")
        owner = "env" if group == SCORER else group  # scorers are an argument of `env`
        if owner in given:
            if not ((part := given[owner]) is None or isinstance(part, str)):
                raise ConfigError(
                    f"`{key}` has no effect because `{owner}` is a {type(part).__name__}, not an option. "
                    "Pass the value to its constructor."
                )
        elif group not in EPISODE_KEYS and key != "hydra.searchpath":
            raise ConfigError(
                f"`{key}` has no effect here: rollouts do not write to disk and do not retry. Leave it "
                f"out, or use `ares_exp.run`. Expected a key of {', '.join(given)}, `{SCORER}`, "
                f"or one of {', '.join(EPISODE_KEYS)}."
            )


def _source(env: Any) -> SourceBase:
    if isinstance(env, EnvironmentSource):
        return as_source(env)
    if callable(env):
        return MadeEnvironments(env)
    if isinstance(env, MinimalEnvironment):
        raise ConfigError(
            f"Expected `env` to be a function that makes an environment, got an environment ({type(env).__name__}), "
            "which runs only one episode at a time. Use `env=lambda: …`."
        )
    raise ConfigError(
        "Expected `env` to be an environment source, a function that makes an environment, or an option of `env`, got "
        f"{type(env).__name__}."
    )


@dataclass(frozen=True)
class FinishedEpisode:
    """An episode that has ended, with a reward or an error.

    Attributes:
        result: Result of the episode, with the same fields as a row of `episodes.jsonl` of a run.
        trajectory: Steps of the episode; `None` if its environment could not be created.
        usage: Number of the policy's responses, their tokens and their cost.
    """

    result: EpisodeResult
    trajectory: EpisodeTrajectory | None
    usage: EpisodeUsage

    def __repr__(self) -> str:
        return f"FinishedEpisode({self.result.episode_id!r}, {self.outcome.value}, reward={self.reward})"

    @property
    def task_name(self) -> str:
        """The name of the task."""
        return self.result.task_name

    @property
    def attempt(self) -> int:
        """The number of the attempt at the task, from 0."""
        return self.result.attempt

    @property
    def reward(self) -> float | None:
        """The reward; `None` if the episode ended without a reward, for example because of an error."""
        return self.result.reward

    @property
    def outcome(self) -> Outcome:
        """The outcome of the episode."""
        return self.result.outcome

    @property
    def error(self) -> ErrorInfo | None:
        """The error that ended the episode, or the limit that truncated it; `None` if the episode was completed."""
        return self.result.error


async def rollouts(
    *,
    env: EnvironmentSource | Callable[[], MinimalEnvironment] | str | Mapping[str, Any],
    policy: LLMClient | str | Mapping[str, Any],
    agent: CodeAgentFactory | str | Mapping[str, Any] | None = None,
    container: ContainerFactory | str | Mapping[str, Any] | None = None,
    attempts: int = 1,
    concurrency: int = 4,
    seed: int = 0,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
) -> AsyncGenerator[FinishedEpisode, None]:
    """Runs every task `attempts` times, and yields each episode when it has ended.

    The episodes run on the event loop of the caller. At most `concurrency` episodes are running, or have ended and wait
    until your loop takes them. While your loop handles an episode, the other episodes continue. An error ends only the
    episode in which it occurs. Episodes are not retried.

    If you leave the loop early (`break`, an exception, cancellation, `aclose()`), running episodes are cancelled and
    all containers are released. After `break`, this happens only when Python deletes the generator. To wait until it is
    done, use `async with contextlib.aclosing(rollouts(…)) as episodes:`.

    You can pass `env`, `policy`, `agent` and `container` as an object or as the name of an option (`policy="oracle"`).
    You can also pass the content of an option file (`{"_target_": "my_module.MyPolicy", "temperature": 0.7}`). Objects
    that you pass are not closed.

    Args:
        env: Source of tasks, or a function that creates an environment. The function is called for each episode. If the
            environment's `reset` accepts a seed, it receives the episode's seed.
        policy: Policy that responds to the requests. It can be any `async` function that takes a request.
        agent: Factory of code agents. `None` uses the default option.
        container: Factory of containers. `None` uses the default option.
        attempts: Number of attempts at each task, numbered from 0. They differ only in their seeds.
        concurrency: Maximum number of concurrent episodes.
        seed: Seed of all random choices. The episodes' seeds are the same as in a run with this seed.
        overrides: Overrides of these components and of the limits of episodes, as on the command line:
            `["env.path=tasks", "policy.model=…", "limits.steps=20", "timeouts.agent=600"]`.
        config_dirs: Folders of options, as for `--config-dir`.

    Yields:
        Episodes in the order in which they end.

    Raises:
        UserError: An argument is invalid, or the tasks or the machine cannot be used. Raised when the first episode is
            requested, before a container is started.
    """
    parts, settings, owned = await asyncio.to_thread(
        _make_parts,
        {"env": env, "policy": policy, "agent": agent, "container": container},
        {"attempts": attempts, "concurrency": concurrency, "seed": seed},
        overrides,
        [Path(folder) for folder in config_dirs],
    )
    maker, chooses_task = EpisodeMaker(parts, settings), isinstance(parts.source, MadeEnvironments)
    tasks: set[asyncio.Task[FinishedEpisode]] = set()  # of episodes that were not yielded yet
    finished: asyncio.Queue[asyncio.Task[FinishedEpisode]] = asyncio.Queue()
    at_once = settings.concurrency

    def fill(owed: Iterator[PlannedEpisode]) -> None:
        while len(tasks) < at_once and (planned := next(owed, None)) is not None:
            task = asyncio.create_task(_execute(maker, planned, settings, chooses_task=chooses_task))
            tasks.add(task)
            task.add_done_callback(finished.put_nowait)

    try:
        names = await prepare(parts, settings, maker, logger.warning)
        at_once = bounded_concurrency(parts, settings.concurrency, logger.warning)
        owed = iter(planned_episodes(parts, settings, names))
        fill(owed)
        while tasks:
            task = await finished.get()
            tasks.discard(task)
            fill(owed)  # so that others run while the consumer handles this episode
            yield task.result()
    finally:
        await finish(_release(tasks, owned))


async def _execute(
    maker: EpisodeMaker, planned: PlannedEpisode, settings: Settings, *, chooses_task: bool
) -> FinishedEpisode:
    """Runs one episode. If it fails, the returned episode contains the error. Only `CancelledError` is raised."""
    episode = RunningEpisode(planned=planned, limits=settings.limits)
    failure = await maker.run(episode)
    result, trajectory = episode.to_result(failure), episode.trajectory
    if chooses_task and (name := episode.report().task_name) is not None:
        result = replace(result, task_name=name)
        trajectory = trajectory and replace(trajectory, task_name=name)
    return FinishedEpisode(result, trajectory, episode.usage)


async def _release(
    tasks: Collection[asyncio.Task[FinishedEpisode]], owned: Mapping[str, Callable[[], Awaitable[None]]]
) -> None:
    """Cancels running episodes, waits for their end, and calls the functions in `owned`, which close components.

    The wait takes at most `RELEASE_LIMIT_SEC`.
    """
    await cancel_all(*tasks, within_sec=RELEASE_LIMIT_SEC)
    if stuck := sum(not task.done() for task in tasks):
        logger.warning("%d cancelled episodes did not end within %g s.", stuck, RELEASE_LIMIT_SEC)
    await close_all(owned)
