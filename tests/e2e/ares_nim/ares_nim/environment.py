"""`env=nim`: whoever takes the last match wins. No container, no code agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ares_exp import LLMRequest, LLMResponse, TimeStep
from ares_exp.environments.source import EpisodeParts, Report
from ares_exp.environments.time_step import restart, termination, transition


class NimEnvironments:
    """A task for each number of matches."""

    needs_container = False
    loads_offline = True
    path = None

    def __init__(self, *, matches: Sequence[int]) -> None:
        self._matches = {f"nim_{count}": count for count in matches}

    def load(self, report: Report) -> Sequence[str]:
        return list(self._matches)

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Any of them can be played."""

    def make(self, task_name: str, parts: EpisodeParts) -> Nim:
        return Nim(self._matches[task_name])


class Nim:
    """One game. The other player takes one match at a time."""

    def __init__(self, matches: int) -> None:
        self._matches = self._left = matches

    async def reset(self) -> TimeStep[LLMRequest]:
        self._left = self._matches
        return restart(self._request())

    async def step(self, action: LLMResponse | None) -> TimeStep[LLMRequest]:
        taken = action.text.strip() if action is not None else ""
        if taken not in ("1", "2", "3") or int(taken) > self._left:
            return termination(0.0)
        self._left -= int(taken)
        if self._left <= 1:
            return termination(1.0 if self._left == 0 else 0.0)
        self._left -= 1
        return transition(self._request())

    async def close(self) -> None:
        """Holds nothing."""

    async def __aenter__(self) -> Nim:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    def _request(self) -> LLMRequest:
        text = f"There are {self._left} matches. Take 1, 2 or 3."
        return LLMRequest(messages=[{"role": "user", "content": text}])
