"""Trajectories: recording, storing and loading episodes.

A trajectory is the record of one episode: its requests, responses, commands and rewards. `load(path)` finds the
episodes of a run. This package also exports record classes, collectors, and functions that serialise requests and
responses. Each name is imported on first use.

Depends on `containers`, `environment` and `records`. Used by all code that records or reads episodes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ares_exp.trajectories.collecting_environment import (
        TrajectoryCollectingEnvironment as TrajectoryCollectingEnvironment,
    )
    from ares_exp.trajectories.collector import TrajectoryCollector as TrajectoryCollector
    from ares_exp.trajectories.collectors import JsonTrajectoryCollector as JsonTrajectoryCollector
    from ares_exp.trajectories.collectors import NullTrajectoryCollector as NullTrajectoryCollector
    from ares_exp.trajectories.records import EpisodeTrajectory as EpisodeTrajectory
    from ares_exp.trajectories.records import StepRecord as StepRecord
    from ares_exp.trajectories.records import deserialize_llm_request as deserialize_llm_request
    from ares_exp.trajectories.records import deserialize_llm_response as deserialize_llm_response
    from ares_exp.trajectories.records import serialize_llm_request as serialize_llm_request
    from ares_exp.trajectories.records import serialize_llm_response as serialize_llm_response
    from ares_exp.trajectories.stored_episodes import StoredEpisode as StoredEpisode
    from ares_exp.trajectories.stored_episodes import StoredEpisodes as StoredEpisodes
    from ares_exp.trajectories.stored_episodes import load as load

_RECORDS = ("EpisodeTrajectory", "StepRecord", "deserialize_llm_request", "deserialize_llm_response")
_OWNERS = {
    **dict.fromkeys((*_RECORDS, "serialize_llm_request", "serialize_llm_response"), "ares_exp.trajectories.records"),
    **dict.fromkeys(("StoredEpisode", "StoredEpisodes", "load"), "ares_exp.trajectories.stored_episodes"),
    **dict.fromkeys(("JsonTrajectoryCollector", "NullTrajectoryCollector"), "ares_exp.trajectories.collectors"),
    "TrajectoryCollector": "ares_exp.trajectories.collector",
    "TrajectoryCollectingEnvironment": "ares_exp.trajectories.collecting_environment",
}

__all__ = sorted(_OWNERS)


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module 'ares_exp.trajectories' has no attribute {name!r}")
    return getattr(import_module(_OWNERS[name]), name)
