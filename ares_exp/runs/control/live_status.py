"""The live state of a run, for its terminal, its monitor and `status.json`."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ares_exp.records.episode_usage import EpisodeUsage
from ares_exp.records.results import UNFINISHED, EpisodeResult
from ares_exp.records.statistics.estimate import Estimate, mean_over_attempts
from ares_exp.runs.budget import Budget, Spent
from ares_exp.runs.control.status import EpisodeStatus, Held, RunStatus, State
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import Scheduler

MAX_ERRORS = 2
MAX_ERROR_CHARS = 300

_HOSTNAME = socket.gethostname()


class LiveStatus:
    """Counts ended episodes, and reads the running ones on demand. May be read from any thread.

    Attributes:
        planned: Number of attempts of the run.
        expected: Number of tries of this session: attempts and retries.
        done_before: Number of attempts that earlier sessions have done.
        held: The pause; `None` without one.
        has_ended: Whether all episodes have ended.
        spent: Returns the spending that counts towards the budget.
        budget: The current budget.
        max_loop_lag_sec: Returns the longest delay of the event loop.
    """

    def __init__(
        self,
        running: Callable[[], Sequence[RunningEpisode]],
        scheduler: Scheduler,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Keeps the arguments.

        Args:
            running: Returns the running episodes.
            scheduler: The scheduler that runs them.
            clock: The clock of `RunningEpisode.since`.
            now: The clock of `RunningEpisode.started_at`.
        """
        self.planned = self.expected = self.done_before = 0
        self.held: Held | None = None
        self.has_ended = False
        self.spent: Callable[[], Spent] = Spent
        self.budget = Budget()
        self.max_loop_lag_sec: Callable[[], float] = float
        self._running = running
        self._scheduler = scheduler
        self._clock = clock
        self._now = now
        self._started_at = now()
        self._rewards: dict[str, list[float]] = {}
        self._reward: Estimate | None = None
        self._errors: deque[str] = deque(maxlen=MAX_ERRORS)
        self._usage = EpisodeUsage()
        self._ended = self._cut_short = 0

    def add(self, result: EpisodeResult) -> None:
        """Counts an episode that has ended."""
        self._ended += 1
        self._cut_short += result.outcome in UNFINISHED
        self._usage.prompt_tokens += result.prompt_tokens
        self._usage.generated_tokens += result.generated_tokens
        self._usage.cost += result.cost
        if result.reward is not None:
            self._rewards.setdefault(result.task_name, []).append(result.reward)
            self._reward = None
        if result.error is not None and result.reward is None and result.outcome not in UNFINISHED:
            sentence = f"{result.error.type} ({result.task_name}): {result.error.message}"
            self._errors.append(sentence[:MAX_ERROR_CHARS])

    def read(self) -> RunStatus:
        """Returns the current state."""
        now, running = self._now(), self._running()
        offset = now - self._clock()
        tokens = self._usage.tokens + sum(one.usage.tokens for one in running)
        if self._reward is None:
            self._reward = mean_over_attempts(list(self._rewards.values()))
        mean = self._reward
        limits = {name: value for name, value in asdict(self.budget).items() if name != "sweep"}
        limits |= {f"sweep.{name}": value for name, value in asdict(self.budget.sweep).items()}
        return RunStatus(
            written_at=now,
            started_at=self._started_at,
            pid=os.getpid(),
            hostname=_HOSTNAME,
            state=self.state,
            held=self.held,
            concurrency=self._scheduler.concurrency,
            planned=self.planned,
            done_before=self.done_before,
            expected=self.expected,
            ended=self._ended,
            cut_short=self._cut_short,
            queued=self._scheduler.queued,
            waiting=dict(Counter(one.waits_for for one in running)),
            reward=(mean.value, mean.low, mean.high) if mean is not None else (None, None, None),
            tokens=tokens,
            cost=self._usage.cost + sum(one.usage.cost for one in running),
            tokens_per_sec=tokens / max(now - self._started_at, 1e-3),
            spent=asdict(self.spent()),
            budget={name: value for name, value in limits.items() if value is not None},
            max_loop_lag_sec=self.max_loop_lag_sec(),
            errors=list(reversed(self._errors)),
            episodes=[
                EpisodeStatus(
                    episode_id=one.planned.episode_id,
                    task_name=one.planned.task_name,
                    attempt=one.planned.attempt,
                    retry=one.planned.retry,
                    waits_for=one.waits_for,
                    since=round(one.since + offset, 3),
                    started_at=round(one.started_at, 3),
                    num_steps=one.usage.step_count,
                    tokens=one.usage.tokens,
                    cost=round(one.usage.cost, 6),
                )
                for one in running
            ],
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
        return "running"
