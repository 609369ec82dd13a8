"""An environment source without containers, for trainings: two steps, and a reward that the responses decide.

Where there is a folder `open`, it has one file per open episode.
"""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ares_exp.environment import EnvironmentWrapper, TimeStep, restart, termination, transition
from ares_exp.environments.source import EpisodeParts, Report, SourceBase
from ares_exp.llms.request import LLMRequest

TASKS = ("apple", "bread", "cider")
OPEN = Path("open")


class Counted:
    """Asks twice; its reward is the share of responses with `yes`. Counts its open episodes."""

    open_ = 0

    def __init__(self, task_name: str, *, forgets: bool) -> None:
        self._forgets, self._is_open = forgets, False
        self._file = OPEN / uuid.uuid4().hex
        self._right: list[bool] = []
        self._messages: list[Any] = [{"role": "user", "content": task_name}]

    async def reset(self) -> TimeStep[Any]:
        Counted.open_, self._is_open = Counted.open_ + 1, True
        if OPEN.exists():
            self._file.touch()
        return restart(LLMRequest(list(self._messages)))

    async def step(self, action: Any) -> TimeStep[Any]:
        self._right.append("yes" in action.text)
        if len(self._right) == 2:
            return termination(sum(self._right) / 2)
        said = [] if self._forgets else [{"role": "assistant", "content": action.text}]
        self._messages = [
            *(self._messages if not self._forgets else ()),
            *said,
            {"role": "user", "content": "the file"},
        ]
        return transition(LLMRequest(list(self._messages)))

    async def close(self) -> None:
        Counted.open_ -= self._is_open
        self._is_open = False
        self._file.unlink(missing_ok=True)


class CountedTasks(SourceBase):
    path = None
    needs_container = False

    def __init__(self, *, forgets: bool = False) -> None:
        self._forgets = forgets

    def load(self, report: Report) -> Sequence[str]:
        return TASKS

    def digest(self, task_name: str) -> str:
        return f"digest of {task_name}"

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        pass

    def make(self, task_name: str, parts: EpisodeParts) -> EnvironmentWrapper:
        return EnvironmentWrapper(Counted(task_name, forgets=self._forgets))


def options(folder: Path) -> Path:
    (folder / "env").mkdir(parents=True)
    (folder / "env" / "counted.yaml").write_text(f"_target_: {__name__}.CountedTasks\n")
    return folder
