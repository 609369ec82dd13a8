"""LLM code agents as reproducible RL experiments.

To start a run, use `python -m ares_exp`, or `run` and the other names of this module in a script. Importing this
package is fast, because each name is imported from its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ares_exp.agents.shell_agent import ShellAgentFactory as ShellAgentFactory
    from ares_exp.containers.daytona import DaytonaContainerFactory as DaytonaContainerFactory
    from ares_exp.containers.docker import DockerContainerFactory as DockerContainerFactory
    from ares_exp.containers.local import LocalContainerFactory as LocalContainerFactory
    from ares_exp.environment import Environment as Environment
    from ares_exp.environment import TimeStep as TimeStep
    from ares_exp.environments.code_environment import CodeEnvironment as CodeEnvironment
    from ares_exp.environments.episode_limits import EpisodeLimits as EpisodeLimits
    from ares_exp.llms.request import LLMRequest as LLMRequest
    from ares_exp.llms.response import LLMResponse as LLMResponse
    from ares_exp.rollout import run_episode as run_episode
    from ares_exp.runs.from_python import RunResults as RunResults
    from ares_exp.runs.from_python import arun as arun
    from ares_exp.runs.from_python import run as run
    from ares_exp.runs.rollouts import FinishedEpisode as FinishedEpisode
    from ares_exp.runs.rollouts import rollouts as rollouts
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot as EnvironmentSnapshot
    from ares_exp.tasks.harbor_task import load_task as load_task
    from ares_exp.training.driver import driven as driven
    from ares_exp.trajectories.collecting_environment import (
        TrajectoryCollectingEnvironment as TrajectoryCollectingEnvironment,
    )
    from ares_exp.trajectories.collectors import JsonTrajectoryCollector as JsonTrajectoryCollector
    from ares_exp.trajectories.collectors import NullTrajectoryCollector as NullTrajectoryCollector
    from ares_exp.trajectories.records import EpisodeTrajectory as EpisodeTrajectory
    from ares_exp.trajectories.records import serialize_llm_request as serialize_llm_request
    from ares_exp.trajectories.records import serialize_llm_response as serialize_llm_response
    from ares_exp.wrappers.async_gym import wrap_as_gym as wrap_as_gym
    from ares_exp.wrappers.registry import EnvironmentInfo as EnvironmentInfo
    from ares_exp.wrappers.registry import info as info
    from ares_exp.wrappers.registry import list_presets as list_presets
    from ares_exp.wrappers.registry import make as make
    from ares_exp.wrappers.registry import register_env as register_env
    from ares_exp.wrappers.registry import register_preset as register_preset

_OWNERS = {
    "CodeEnvironment": "ares_exp.environments.code_environment",
    "DaytonaContainerFactory": "ares_exp.containers.daytona",
    "DockerContainerFactory": "ares_exp.containers.docker",
    "Environment": "ares_exp.environment",
    "EnvironmentInfo": "ares_exp.wrappers.registry",
    "EnvironmentSnapshot": "ares_exp.snapshots.snapshot",
    "EpisodeLimits": "ares_exp.environments.episode_limits",
    "EpisodeTrajectory": "ares_exp.trajectories.records",
    "FinishedEpisode": "ares_exp.runs.rollouts",
    "JsonTrajectoryCollector": "ares_exp.trajectories.collectors",
    "LLMRequest": "ares_exp.llms.request",
    "LLMResponse": "ares_exp.llms.response",
    "LocalContainerFactory": "ares_exp.containers.local",
    "NullTrajectoryCollector": "ares_exp.trajectories.collectors",
    "RunResults": "ares_exp.runs.from_python",
    "ShellAgentFactory": "ares_exp.agents.shell_agent",
    "TimeStep": "ares_exp.environment",
    "TrajectoryCollectingEnvironment": "ares_exp.trajectories.collecting_environment",
    "arun": "ares_exp.runs.from_python",
    "info": "ares_exp.wrappers.registry",
    "list_presets": "ares_exp.wrappers.registry",
    "load_task": "ares_exp.tasks.harbor_task",
    "make": "ares_exp.wrappers.registry",
    "register_env": "ares_exp.wrappers.registry",
    "register_preset": "ares_exp.wrappers.registry",
    "driven": "ares_exp.training.driver",
    "rollouts": "ares_exp.runs.rollouts",
    "run": "ares_exp.runs.from_python",
    "run_episode": "ares_exp.rollout",
    "serialize_llm_request": "ares_exp.trajectories.records",
    "serialize_llm_response": "ares_exp.trajectories.records",
    "wrap_as_gym": "ares_exp.wrappers.async_gym",
}

__all__ = sorted(_OWNERS)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module 'ares_exp' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
