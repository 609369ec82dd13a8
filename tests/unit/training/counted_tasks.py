"""An environment source without containers, for trainings: two steps, and a reward that the answers decide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ares_exp.environment import EnvironmentWrapper, TimeStep, restart, termination, transition
from ares_exp.environments.source import EpisodeParts, Report, SourceBase
from ares_exp.llms.request import LLMRequest

TASKS = ("apple", "bread", "cider")


class Counted:
    """Asks twice; its reward is the share of answers with `yes`. Counts its open episodes."""

    open_ = 0

    def __init__(self, task_name: str) -> None:
        self._task_name = task_name
        self._right: list[bool] = []

    async def reset(self) -> TimeStep[Any]:
        Counted.open_ += 1
        return restart(LLMRequest([{"role": "user", "content": self._task_name}]))

    async def step(self, action: Any) -> TimeStep[Any]:
        self._right.append("yes" in action.text)
        if len(self._right) == 2:
            return termination(sum(self._right) / 2)
        return transition(LLMRequest([{"role": "user", "content": f"{self._task_name} again"}]))

    async def close(self) -> None:
        Counted.open_ -= 1


class CountedTasks(SourceBase):
    path = None
    needs_container = False

    def load(self, report: Report) -> Sequence[str]:
        return TASKS

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        pass

    def make(self, task_name: str, parts: EpisodeParts) -> EnvironmentWrapper:
        return EnvironmentWrapper(Counted(task_name))


def options(folder: Path) -> Path:
    """Writes the option `env=counted`; returns the folder of options."""
    (folder / "env").mkdir(parents=True)
    (folder / "env" / "counted.yaml").write_text(f"_target_: {__name__}.CountedTasks\n")
    return folder
