"""The components of a run, one for each config group, and the top-level settings such as `attempts`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ares_exp.agents.code_agent import AgentFactoryBase, as_agent_factory, effective_agent
from ares_exp.config.targets import instantiate_group, instantiate_node, instantiate_several
from ares_exp.containers.container import ContainerFactoryBase, as_container_factory
from ares_exp.environment import MinimalEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits, TimeLimits
from ares_exp.environments.source import SourceBase, make_scored_source
from ares_exp.policies.policy import Policy, as_policy
from ares_exp.runs.budget import Budget
from ares_exp.runs.executors.executor import Executor, LocalExecutor, Recipe
from ares_exp.runs.retries import RetryRules
from ares_exp.snapshots.schedule import NoSnapshots, SnapshotSchedule
from ares_exp.trackers.tracker import SeveralTrackers, TrackerBase
from ares_exp.trajectories.collector import CollectorBase, as_collector

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ares_exp.runs.branching import Branching
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
