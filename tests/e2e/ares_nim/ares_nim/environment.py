"""`env=nim`: taking the last match wins. No container, no code agent; three methods are an environment."""

from __future__ import annotations

from collections.abc import Sequence

from ares_exp import LLMRequest, LLMResponse, TimeStep
from ares_exp.environment import restart, termination, transition
from ares_exp.environments.source import EpisodeParts, Report
from ares_exp.errors import EpisodeStateError


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
        """Any of them can be run."""

    def make(self, task_name: str, parts: EpisodeParts) -> Nim:
        return Nim(self._matches[task_name])


class Nim:
    """One game. The other player takes one match at a time."""

    def __init__(self, matches: int) -> None:
        self._matches, self._left = matches, 0

    async def reset(self) -> TimeStep[LLMRequest]:
        self._left = self._matches
        return restart(self._request())

    async def step(self, action: LLMResponse | None) -> TimeStep[LLMRequest]:
        if self._left < 1:
            raise EpisodeStateError("There is no game: call reset() first.")
        taken = action.text.strip() if action is not None else ""
        is_allowed = taken in ("1", "2", "3") and int(taken) <= self._left
        left = self._left - int(taken) if is_allowed else 1
        self._left = max(left - 1, 0)
        if self._left:
            return transition(self._request())
        return termination(1.0 if left == 0 else 0.0)

    async def close(self) -> None:
        """Holds nothing."""

    def _request(self) -> LLMRequest:
        text = f"There are {self._left} matches. Take 1, 2 or 3."
        return LLMRequest(messages=[{"role": "user", "content": text}])
