"""The lines below the bar of progress: what episodes wait for, reward, cost, speed, the slowest, the last errors."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ares_exp.records.episode_usage import EpisodeUsage
from ares_exp.records.results import UNFINISHED, EpisodeResult
from ares_exp.statistics.estimate import mean_over_attempts
from ares_exp.terminal.terminal import format_duration, format_number, one_line

SLOWEST, ERRORS = 3, 2
SLOW_SEC = 5.0
"""An episode that has waited for less is not named."""
PLACES = {"start": "to start", "policy": "for the policy", "environment": "for the environment"}
ENDING = "to be released"


class PlayedEpisode(Protocol):
    """An episode under way, as far as the panel looks at it."""

    usage: EpisodeUsage
    since: float
    started_at: float

    @property
    def waits_for(self) -> str:
        """What it waits for."""
        ...

    @property
    def title(self) -> str:
        """Its task and attempt."""
        ...


class Panel:
    """Adds up what has ended, and looks at what is under way, when it is drawn."""

    def __init__(
        self,
        running: Callable[[], Sequence[PlayedEpisode]],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Keeps the arguments.

        Args:
            running: Returns the episodes under way; called from the thread that draws.
            clock: The clock of `PlayedEpisode.since`.
            now: The clock of `PlayedEpisode.started_at`.
        """
        self._running = running
        self._clock = clock
        self._now = now
        self._began = clock()
        self._rewards: dict[str, list[float]] = {}
        self._errors: deque[str] = deque(maxlen=ERRORS)
        self._ended = EpisodeUsage()

    def finished(self, result: EpisodeResult) -> None:
        """Counts an episode that has ended."""
        self._ended.prompt_tokens += result.prompt_tokens
        self._ended.generated_tokens += result.generated_tokens
        self._ended.cost += result.cost
        if result.reward is not None:
            self._rewards.setdefault(result.task_name, []).append(result.reward)
        if result.error is not None and result.reward is None and result.outcome not in UNFINISHED:
            self._errors.append(f"{result.error.type} ({result.task_name}): {result.error.message}")

    def lines(self, width: int = 100) -> list[str]:
        """Returns the lines, none longer than `width`; no line for what is not known."""
        running = self._running()
        found = [self._waiting(running), self._totals(running), *self._slowest(running)]
        found += [f"error: {one}" for one in reversed(self._errors)]
        return [one_line(line, width) for line in found if line]

    def _waiting(self, running: Sequence[PlayedEpisode]) -> str:
        counts = Counter(PLACES.get(one.waits_for, ENDING) for one in running)
        return f"waiting {', '.join(f'{place}: {many}' for place, many in counts.most_common())}" if counts else ""

    def _totals(self, running: Sequence[PlayedEpisode]) -> str:
        usages = [self._ended, *(one.usage for one in running)]
        tokens, cost = sum(one.tokens for one in usages), sum(one.cost for one in usages)
        elapsed = max(self._clock() - self._began, 1e-3)
        return "; ".join([*self._reward(), *([f"${cost:,.4f}"] if cost else []), *_speed(tokens, elapsed)])

    def _reward(self) -> Iterable[str]:
        estimate = mean_over_attempts(list(self._rewards.values()))
        if estimate is not None and estimate.low is not None and estimate.high is not None:
            low, high = format_number(estimate.low), format_number(estimate.high)
            yield f"reward {format_number(estimate.value)} [{low}, {high}]"

    def _slowest(self, running: Sequence[PlayedEpisode]) -> Iterable[str]:
        clock, now = self._clock(), self._now()
        slow = sorted((one for one in running if clock - one.since >= SLOW_SEC), key=lambda one: one.since)
        for one in slow[:SLOWEST]:
            waited, whole = format_duration(clock - one.since), format_duration(now - one.started_at)
            place = PLACES.get(one.waits_for, ENDING)
            yield f"{one.title}: step {one.usage.step_count}, has waited {waited} {place}, {whole} in all"


def _speed(tokens: int, elapsed: float) -> Iterable[str]:
    if tokens:
        yield f"{tokens:,} tokens, {tokens / elapsed:,.0f}/s"
