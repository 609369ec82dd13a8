"""`SweBenchGym`: SWE-bench as a `gymnasium.Env`. It is what `ares_exp/SWEBench-v0` makes."""

from __future__ import annotations

from ares_exp.environments.swebench import SweBenchEnvironments
from ares_exp.wrappers.source_gym import SourceGym


class SweBenchGym(SourceGym):
    """Plays rows of SWE-bench: arguments of `SweBenchEnvironments` (`dataset`, `tasks`, …) and of `SourceGym`."""

    source = SweBenchEnvironments
