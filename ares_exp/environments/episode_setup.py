"""What the episodes of an environment have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ares_exp.agents.code_agent import CodeAgentFactory
from ares_exp.containers.container import ContainerFactory
from ares_exp.environments.episode_limits import EpisodeLimits


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """What the episodes of an environment have in common; see `CodeEnvironment`."""

    container_factory: ContainerFactory
    code_agent_factory: CodeAgentFactory
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    provide_solution: bool = False
    output_dir: Path | None = None
