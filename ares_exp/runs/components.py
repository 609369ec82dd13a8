"""The components of a run, one for each config group, and the top-level settings such as `attempts`.

`prepare` reads the task set and runs all checks of the components. No container is started.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from ares_exp.agents.code_agent import AgentFactoryBase, as_agent_factory, effective_agent
from ares_exp.config.parts import name_of
from ares_exp.config.schema import KEYS, validate
from ares_exp.config.targets import instantiate_group, instantiate_node, instantiate_several
from ares_exp.containers.container import ContainerFactoryBase, as_container_factory
from ares_exp.environment import MinimalEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits, TimeLimits
from ares_exp.environments.source import EpisodeParts, SourceBase, make_scored_source
from ares_exp.errors import ConfigError, UserError
from ares_exp.policies.policy import Policy, as_policy
from ares_exp.records.terminal_text import first_of
from ares_exp.runs.budget import Budget
from ares_exp.runs.executors.executor import Executor, LocalExecutor, Recipe, RunPlan
from ares_exp.runs.retries import RetryRules
from ares_exp.runs.scheduler import PlannedEpisode, plan_episodes
from ares_exp.snapshots.schedule import NoSnapshots, SnapshotSchedule
from ares_exp.trackers.tracker import SeveralTrackers, TrackerBase
from ares_exp.trajectories.collector import CollectorBase, as_collector

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ares_exp.runs.branching import Branching
    from ares_exp.runs.running_episode import EpisodeMaker
    from ares_exp.runs.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Components:
    """The components of a run: one instance for each config group.

    Attributes:
        recipe: Recipe from which other processes create the same environments; `None` if some components were passed as
            Python objects.
        trainer: Trainer that chooses the episodes and learns from them; `None` if every task is run `attempts` times.
    """

    source: SourceBase
    agent_factory: AgentFactoryBase
    container_factory: ContainerFactoryBase
    policy: Policy
    wrapper: Callable[[MinimalEnvironment], MinimalEnvironment]
    collectors: Mapping[str, CollectorBase]
    tracker: TrackerBase
    snapshots: SnapshotSchedule | NoSnapshots = field(default_factory=NoSnapshots)
    branching: Branching | None = None
    retry: RetryRules = field(default_factory=RetryRules)
    budget: Budget = field(default_factory=Budget)
    executor: Executor = field(default_factory=LocalExecutor)
    recipe: Recipe | None = None
    trainer: Trainer | None = None

    @property
    def effective_agent(self) -> AgentFactoryBase:
        """The configured agent. If reference solutions are run, the shell agent replaces a third-party agent."""
        return effective_agent(self.agent_factory, runs_solutions=self.policy.needs_solution)

    @classmethod
    def of(cls, config: DictConfig, given: Mapping[str, Any] | None = None) -> Self:
        """Creates all components from a composed config. Constructors only validate their arguments.

        If `given` contains an object for a group, such as `policy`, uses this object instead of the group's config.

        Raises:
            ConfigError: A component cannot be created.
        """
        objects = given or {}

        def part(group: str) -> Any:
            return objects[group] if group in objects else instantiate_group(config, group)

        return cls(
            source=make_scored_source(config),
            agent_factory=as_agent_factory(part("agent")),
            container_factory=as_container_factory(part("container")),
            policy=as_policy(part("policy")),
            wrapper=part("wrapper"),
            collectors={name: as_collector(one) for name, one in instantiate_several(config, "collector").items()},
            tracker=SeveralTrackers(instantiate_several(config, "tracker")),
            snapshots=part("snapshot"),
            branching=_branching(config),
            retry=instantiate_node(config, "retry"),
            budget=instantiate_node(config, "budget"),
            trainer=objects.get("trainer"),
            executor=part("executor"),
            recipe=None if objects.keys() - {"policy", "trainer"} else Recipe.of(config),  # both stay in this process
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """The top-level config keys that the experiment uses. `ares_exp.config.schema` describes them."""

    attempts: int
    concurrency: int
    seed: int
    limits: EpisodeLimits
    policy_timeout_sec: float | None
    reward_threshold: float = 1.0
    sweep_dir: Path | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], *, sweep_dir: Path | None = None) -> Self:
        """Creates the settings from a resolved config."""
        timeouts = values["timeouts"]
        time_limits = TimeLimits(
            timeout_multiplier=timeouts["multiplier"],
            agent_timeout_sec=timeouts["agent"],
            agent_timeout_max_sec=timeouts["agent_max"],
            agent_timeout_multiplier=timeouts["agent_multiplier"],
            verifier_timeout_sec=timeouts["verifier"],
            verifier_timeout_max_sec=timeouts["verifier_max"],
            verifier_timeout_multiplier=timeouts["verifier_multiplier"],
            environment_build_timeout_multiplier=timeouts["build_multiplier"],
        )
        return cls(
            attempts=values["attempts"],
            concurrency=values["concurrency"],
            seed=values["seed"],
            limits=EpisodeLimits(
                **values["limits"], time=time_limits, verify_on_truncation=values["verify_on_truncation"]
            ),
            policy_timeout_sec=timeouts["policy"],
            reward_threshold=values["reward_threshold"],
            sweep_dir=sweep_dir,
        )


def composed_parts(overrides: Sequence[str], config_dirs: Sequence[Path]) -> tuple[DictConfig, EpisodeParts]:
    """Composes a config, and creates the parts of episodes from it. Raises `ConfigError` if the config is invalid."""
    from ares_exp.config.hydra_setup import compose_config  # loads Hydra, which is slow

    config = compose_config(overrides, config_dirs=config_dirs)
    values = {name: config[name] for name in KEYS}
    validate(values)
    settings = Settings.of(values)
    containers = as_container_factory(instantiate_group(config, "container"))
    agents = as_agent_factory(instantiate_group(config, "agent"))
    return config, EpisodeParts(containers, agents, settings.limits, seed=settings.seed)


async def close_all(closing: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
    """Calls functions that close components, by the components' names. Failures are only logged."""
    for what, close in closing.items():
        try:
            await close()
        except Exception as error:
            logger.warning("The %s could not be closed: %s: %s", what, type(error).__name__, error)


def _branching(config: DictConfig) -> Branching | None:
    if config.branch_from is None:
        return None
    from ares_exp.runs.branching import Branching, BranchOptions

    return Branching(config.branch_from, BranchOptions(**config.branch))


SHOWN_TASKS = 5
OPEN_FILES, OPEN_FILES_PER_EPISODE = 40, 14
"""Number of open files that the run itself needs, and number that each concurrent episode needs at most."""


async def prepare(
    parts: Components,
    settings: Settings,
    maker: EpisodeMaker,
    warn: Callable[[str], None],
    *,
    run_dir: Path | None = None,
) -> Sequence[str]:
    """Reads the task set, and runs all checks that do not need a container. Returns the names of the tasks to run.

    Raises:
        UserError: A check failed. The message lists all problems. No container was started.
    """
    check_collectors(parts.collectors.values(), settings.concurrency)
    if parts.branching is not None and not parts.source.exports_state:
        raise ConfigError(
            f"`branch_from` does not work with {name_of(parts.source)}, because its environments have no "
            "`export_state`. Run the task again, or replay the recorded responses with "
            "`replay=<run>/<episode>`."
        )
    _check_agent(parts)
    check_snapshots(parts)
    checks = [_load(parts.source, warn), parts.policy.preflight()]
    checks += parts.executor.checks(parts.source, maker.environment_parts())
    if parts.source.needs_container and parts.effective_agent is not parts.agent_factory:
        checks.append(parts.agent_factory.preflight())
        warn(
            f"With this policy, the shell agent runs the solutions of the tasks. agent={parts.agent_factory.name} is "
            "checked, but does not run. To run it, choose another policy: `policy=openai policy.model=…`."
        )
    outcomes = await asyncio.gather(*checks, return_exceptions=True)
    _raise_all(outcomes)
    if parts.policy.needs_solution and not parts.source.has_solutions:
        raise ConfigError(
            f"policy=oracle, or a recording of it, needs tasks with solutions, but {name_of(parts.source)} "
            "has no solutions. Choose another policy: `policy=openai policy.model=…`, `policy=scripted "
            "policy.replies=[…]`."
        )
    names = _narrowed(parts, cast("Sequence[str]", outcomes[0]), warn)
    ran = RunPlan(
        source=parts.source,
        task_names=names,
        parts=maker.environment_parts(),  # after the preflight of the policy, which may need solutions
        recipe=parts.recipe,
        run_dir=run_dir,
        needs_shared_disk=_need_of_shared_disk(parts),
    )
    await parts.executor.open(ran, warn)
    return names


def _need_of_shared_disk(parts: Components) -> str | None:
    """Returns the reason why all nodes of a cluster must share the run directory; `None` if they need not."""
    if parts.branching is not None:
        return "`branch_from` reads a snapshot from it"
    return "`snapshot` writes snapshots to it from each node" if parts.snapshots.output_dir is not None else None


def bounded_concurrency(parts: Components, asked: int, warn: Callable[[str], None]) -> int:
    """Returns the number of episodes that can run at once, which is at most `asked`.

    Raises this process's limit on open files if necessary. Warns if the container backend supports fewer containers, or
    if the limit on open files cannot be raised enough. Must be called after the backend's preflight.
    """
    _allow_open_files(asked, warn)
    most = parts.container_factory.max_containers
    if not parts.source.needs_container or most is None or asked <= most:
        return asked
    warn(
        f"container={parts.container_factory.name} supports at most concurrency={most} on this machine, so "
        f"concurrency={asked} has no effect."
    )
    return most


def _allow_open_files(episodes: int, warn: Callable[[str], None]) -> None:
    needed = OPEN_FILES + episodes * OPEN_FILES_PER_EPISODE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        most = max(1, (allowed - OPEN_FILES) // OPEN_FILES_PER_EPISODE)
        warn(
            f"concurrency={episodes} may need {needed} open files, and this process may open {allowed}. Raise the "
            f"limit with `ulimit -n {needed}`, or set concurrency={most}."
        )


def check_collectors(collectors: Iterable[CollectorBase], concurrency: int) -> None:
    """Raises `ConfigError` if episodes run concurrently but a collector can only record one episode at a time."""
    for collector in collectors:
        if concurrency > 1 and not collector.keeps_apart:
            raise ConfigError(
                f"{name_of(collector)} records one episode at a time: its `record_step` has no argument "
                "`episode`. Set `concurrency=1`."
            )


def planned_episodes(parts: Components, settings: Settings, task_names: Sequence[str]) -> list[PlannedEpisode]:
    """Plans every attempt at every task. An attempt that replays an episode gets the seed of the recorded episode."""
    planned = plan_episodes(task_names, attempts=settings.attempts, seed=settings.seed)
    seeds = [parts.policy.seed_of(*one.slot) for one in planned]
    return [one if seed is None else replace(one, seed=seed) for one, seed in zip(planned, seeds, strict=True)]


def _check_agent(parts: Components) -> None:
    containers, agents = parts.container_factory, parts.effective_agent
    if not parts.source.needs_container:
        return
    if agents.needs_terminal and not containers.has_terminals:
        raise ConfigError(
            f"{agents.name} needs a terminal, but container={containers.name} has none. Use container=local, "
            "container=docker or container=daytona, or agent=tools or agent=shell."
        )
    if agents.needs_forwarded_port and not containers.forwards_ports:
        raise ConfigError(
            f"agent={agents.name} is a program in the container, whose LLM calls need a forwarded port, but "
            f"container={containers.name} cannot forward ports (`forwards_ports = True` is missing). Use "
            "container=local, container=docker or container=daytona, or agent=tools or agent=shell."
        )


def check_snapshots(parts: Components) -> None:
    """Raises `ConfigError` if the configured snapshots cannot be taken, or if no episode can be restored from them."""
    agents, schedule = parts.effective_agent, parts.snapshots
    if schedule.output_dir is None:
        return
    if not parts.source.exports_state:
        raise ConfigError(
            f"Snapshots need environments that can export their state, but {name_of(parts.source)} does not declare "
            "this (`exports_state = True`). Set `snapshot=none`."
        )
    parts.container_factory.check_snapshots()
    agents.check_snapshots()
    if schedule.is_only_to_continue and not agents.can_be_restored:
        raise ConfigError(
            f"Expected `snapshot=on_failure`, `manual` or `none` with agent={agents.name}, which is a "
            "program in its container: a snapshot contains its files, but cannot restore its process. "
            "`resume=` and `branch_from=` need no snapshots: they replay the recorded responses in a new "
            "container. The files of the agent are stored in files/<episode>/agent/."
        )


async def _load(source: SourceBase, warn: Callable[[str], None]) -> Sequence[str]:
    try:
        names = await asyncio.to_thread(source.load, warn)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename is not None else error
        raise ConfigError(f"Cannot read the tasks: {what}. Choose other tasks, or change the permissions.") from error
    await source.preflight()
    return names


def _narrowed(parts: Components, task_names: Sequence[str], warn: Callable[[str], None]) -> Sequence[str]:
    """Returns the names of the tasks to run: all tasks, or the recorded tasks if the run branches or replays."""
    recorded = parts.policy.recorded_tasks if parts.branching is None else (parts.branching.task_name,)
    if recorded is None:
        return task_names
    kept = [name for name in task_names if name in recorded]
    if not kept:
        raise ConfigError(
            f"None of the recorded tasks ({first_of([*recorded], SHOWN_TASKS)}) is a task of "
            f"{name_of(parts.source)}, which has {first_of(task_names, SHOWN_TASKS)}. Choose the same `env` as in the "
            "recording."
        )
    if len(kept) < len(task_names):
        parts.source.keep(kept)
        if parts.branching is None:
            left_out = first_of([name for name in task_names if name not in recorded], SHOWN_TASKS)
            warn(f"Tasks are left out, because they have no recorded episode: {left_out}.")
    return kept


def _raise_all(outcomes: Sequence[object]) -> None:
    """Raises the errors among the outcomes of several checks. Does nothing if there are none.

    If all are `UserError`s, combines them into one error that lists all problems. If not, raises the first other error.
    """
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in errors:
        if not isinstance(error, UserError):
            raise error
    if errors:
        raise UserError("\n".join(str(error) for error in errors)) if len(errors) > 1 else errors[0]
