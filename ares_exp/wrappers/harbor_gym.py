"""`HarborGym`: Harbor tasks as a `gymnasium.Env`. It is what `ares_exp/Harbor-v0` makes."""

from __future__ import annotations

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.wrappers.source_gym import SourceGym


class HarborGym(SourceGym):
    """Plays Harbor tasks: arguments of `HarborEnvironments` (`path`, `tasks`, `repo`, …) and of `SourceGym`."""

    source = HarborEnvironments
