"""The live state of a run: one count for its terminal and for `status.json`."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ares_exp.control.status import EpisodeStatus, Held, RunStatus, State
from ares_exp.records.episode_usage import EpisodeUsage
from ares_exp.records.results import UNFINISHED, EpisodeResult
from ares_exp.resume.episode_plan import PlannedEpisode
from ares_exp.running.budget import Budget, Spent
from ares_exp.statistics.estimate import Estimate, mean_over_attempts

ERRORS = 2
MAX_ERROR_CHARS = 300


class PlayedEpisode(Protocol):
    """An episode under way, as far as it is looked at."""

    planned: PlannedEpisode
    usage: EpisodeUsage
    since: float
    started_at: float

    @property
    def waits_for(self) -> Any:
        """What it waits for."""
        ...


class PlayingScheduler(Protocol):
    """A scheduler, as far as it is looked at."""

    @property
    def interrupted(self) -> bool:
        """Whether it ends early."""
        ...

    @property
    def paused(self) -> bool:
        """Whether nothing new begins."""
        ...

    @property
    def concurrency(self) -> int:
        """Maximum number of episodes at once."""
        ...

    @property
    def playing(self) -> int:
        """Number of episodes that have begun and have not released everything."""
        ...

    @property
    def queued(self) -> int:
        """Number of tries that wait."""
        ...


class LiveStatus:
    """Adds up what has ended, and looks at what is under way, when it is asked. May be asked from any thread.

    Attributes:
        planned: Number of attempts of the run.
        held: The pause; `None` without one.
        has_ended: Whether all has been played that will be.
        spent: Returns what counts towards the budget.
        budget: The budget in force.
        max_loop_lag_sec: Returns the longest that the event loop was late.
    """

    def __init__(
        self,
        running: Callable[[], Sequence[PlayedEpisode]],
        scheduler: PlayingScheduler,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Keeps the arguments.

        Args:
            running: Returns the episodes under way.
            scheduler: Plays them.
            clock: The clock of `PlayedEpisode.since`.
            now: The clock of `PlayedEpisode.started_at`.
        """
        self.planned = 0
        self.held: Held | None = None
        self.has_ended = False
        self.spent: Callable[[], Spent] = Spent
        self.budget = Budget()
        self.max_loop_lag_sec: Callable[[], float] = float
        self._running = running
        self._scheduler = scheduler
        self._clock = clock
        self._now = now
        self._began = now()
        self._rewards: dict[str, list[float]] = {}
        self._reward: Estimate | None = None
        self._errors: deque[str] = deque(maxlen=ERRORS)
        self._usage = EpisodeUsage()
        self._ended = 0

    def finished(self, result: EpisodeResult) -> None:
        """Counts an episode that has ended."""
        self._ended += 1
        self._usage.prompt_tokens += result.prompt_tokens
        self._usage.generated_tokens += result.generated_tokens
        self._usage.cost += result.cost
        if result.reward is not None:
            self._rewards.setdefault(result.task_name, []).append(result.reward)
            self._reward = None
        if result.error is not None and result.reward is None and result.outcome not in UNFINISHED:
            said = f"{result.error.type} ({result.task_name}): {result.error.message}"
            self._errors.append(said[:MAX_ERROR_CHARS])

    def look(self) -> RunStatus:
        """Returns the state as it is."""
        now, running = self._now(), self._running()
        offset = now - self._clock()
        tokens = self._usage.tokens + sum(one.usage.tokens for one in running)
        return RunStatus(
            written_at=now,
            began=self._began,
            pid=os.getpid(),
            hostname=_HOSTNAME,
            state=self.state,
            held=self.held,
            concurrency=self._scheduler.concurrency,
            planned=self.planned,
            ended=self._ended,
            queued=self._scheduler.queued,
            waiting=dict(Counter(one.waits_for for one in running)),
            reward=self._mean(),
            tokens=tokens,
            cost=self._usage.cost + sum(one.usage.cost for one in running),
            tokens_per_sec=tokens / max(now - self._began, 1e-3),
            spent=asdict(self.spent()),
            budget=_set(self.budget),
            max_loop_lag_sec=self.max_loop_lag_sec(),
            errors=list(reversed(self._errors)),
            episodes=[_status(one, offset) for one in running],
        )

    @property
    def state(self) -> State:
        """How far the run is."""
        if self.has_ended:
            return "ended"
        if self._scheduler.interrupted:
            return "ending"
        if self._scheduler.paused:
            return "pausing" if self._scheduler.playing else "paused"
        return "under way"

    def _mean(self) -> tuple[float | None, float | None, float | None]:
        if self._reward is None:
            self._reward = mean_over_attempts(list(self._rewards.values()))
        found = self._reward
        return (found.value, found.low, found.high) if found is not None else (None, None, None)


_HOSTNAME = socket.gethostname()


def _status(episode: PlayedEpisode, offset: float) -> EpisodeStatus:
    planned, usage = episode.planned, episode.usage
    return EpisodeStatus(
        episode_id=planned.episode_id,
        task_name=planned.task_name,
        attempt=planned.attempt,
        retry=planned.retry,
        waits_for=episode.waits_for,
        since=round(episode.since + offset, 3),
        began=round(episode.started_at, 3),
        num_steps=usage.step_count,
        tokens=usage.tokens,
        cost=round(usage.cost, 6),
    )


def _set(budget: Budget) -> dict[str, float]:
    """Returns the limits that are set, those of the sweep with its name before theirs."""
    own = {name: value for name, value in asdict(budget).items() if isinstance(value, int | float)}
    shared = {f"sweep.{name}": value for name, value in asdict(budget.sweep).items() if value is not None}
    return {**own, **shared}
