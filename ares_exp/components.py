"""What an experiment is made of: one made component for each group, and the settings at the top level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ares_exp.agents.code_agent import CodeAgentFactory
from ares_exp.branching import Branching
from ares_exp.budget import Budget
from ares_exp.containers.container import ContainerFactory
from ares_exp.environments.environment import Environment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EnvironmentSource
from ares_exp.policies.policy import Policy
from ares_exp.policies.resumed import OnDivergence
from ares_exp.retries import RetryRules
from ares_exp.snapshots.schedule import NoSnapshots, SnapshotSchedule
from ares_exp.trackers.tracker import Tracker
from ares_exp.trajectories.collector import TrajectoryCollector


@dataclass(frozen=True, slots=True)
class Components:
    """One made component for each group."""

    source: EnvironmentSource
    agent_factory: CodeAgentFactory
    container_factory: ContainerFactory
    policy: Policy
    wrapper: Callable[[Environment], Environment]
    collectors: Mapping[str, TrajectoryCollector]
    tracker: Tracker
    snapshots: SnapshotSchedule | NoSnapshots = field(default_factory=NoSnapshots)
    branching: Branching | None = None
    retry: RetryRules = field(default_factory=RetryRules)
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True, slots=True)
class Settings:
    """What of the root config the experiment itself needs; see `ares_exp.config`. `sweep_dir`: of its sweep, if any."""

    attempts: int
    concurrency: int
    seed: int
    limits: EpisodeLimits
    policy_timeout_sec: float | None
    resume_diverged: OnDivergence = "continue"
    monitor_interval_sec: float = 10.0
    stall_warn_sec: float = 600.0
    reward_threshold: float = 1.0
    sweep_dir: Path | None = None
