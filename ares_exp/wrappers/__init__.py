"""Gymnasium wrappers of environments, and presets, which create environments by name (`make("harbor:0")`).

Depends on `runs` and `environments`. Used by `ares_exp.gym`, `commands` and user code.

Each name is imported on first use, because most of the modules import gymnasium.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ares_exp.wrappers.async_gym import AsyncGymWrapper as AsyncGymWrapper
    from ares_exp.wrappers.async_gym import EpisodeInfo as EpisodeInfo
    from ares_exp.wrappers.async_gym import wrap_as_gym as wrap_as_gym
    from ares_exp.wrappers.preset_gym import PresetGym as PresetGym
    from ares_exp.wrappers.spaces import TextAction as TextAction
    from ares_exp.wrappers.spaces import TextObservation as TextObservation
    from ares_exp.wrappers.sync_gym import GymWrapper as GymWrapper

_OWNERS = {
    "AsyncGymWrapper": "ares_exp.wrappers.async_gym",
    "EpisodeInfo": "ares_exp.wrappers.async_gym",
    "GymWrapper": "ares_exp.wrappers.sync_gym",
    "PresetGym": "ares_exp.wrappers.preset_gym",
    "TextAction": "ares_exp.wrappers.spaces",
    "TextObservation": "ares_exp.wrappers.spaces",
    "wrap_as_gym": "ares_exp.wrappers.async_gym",
}

__all__ = sorted(_OWNERS)


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(_OWNERS[name]), name)
