"""Trajectories: recording, storing and loading episodes.

Imports containers, the environment contract and records; imported by everything that records or reads episodes.

`load(path)` gives the episodes of a run; it is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ares_exp.trajectories.stored_episodes import StoredEpisode as StoredEpisode
    from ares_exp.trajectories.stored_episodes import StoredEpisodes as StoredEpisodes
    from ares_exp.trajectories.stored_episodes import load as load

_OWNERS = {
    "StoredEpisode": "ares_exp.trajectories.stored_episodes",
    "StoredEpisodes": "ares_exp.trajectories.stored_episodes",
    "load": "ares_exp.trajectories.stored_episodes",
}

__all__ = sorted(_OWNERS)


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module 'ares_exp.trajectories' has no attribute {name!r}")
    return getattr(import_module(_OWNERS[name]), name)
