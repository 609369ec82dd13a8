"""The common setup of an environment's episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ares_exp.agents.code_agent import AgentFactoryBase
from ares_exp.containers.container import ContainerFactoryBase
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.llms.request import LLMClient


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """The common setup of an environment's episodes; see `CodeEnvironment`."""

    container_factory: ContainerFactoryBase
    code_agent_factory: AgentFactoryBase
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    provide_solution: bool = False
    output_dir: Path | None = None
    side_calls: LLMClient | None = None
