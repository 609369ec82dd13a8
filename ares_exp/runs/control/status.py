"""The state of a running run: `status.json`, and the same in lines for people."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter, ValidationError

from ares_exp.errors import ConfigError
from ares_exp.policies.episode_events import WaitsFor
from ares_exp.records.record_files import read_record
from ares_exp.records.results import UNFINISHED, EpisodeResult, EpisodeUsage
from ares_exp.records.run_dir import atomic_file
from ares_exp.records.secrets import mask_known_secrets
from ares_exp.records.statistics.estimate import Estimate, mean_over_attempts
from ares_exp.records.terminal_text import format_duration, format_number
from ares_exp.runs.budget import Budget, Spent

if TYPE_CHECKING:
    from ares_exp.runs.running_episode import RunningEpisode
    from ares_exp.runs.scheduler import Scheduler

MAX_BYTES = 16 * 2**20
MAX_EPISODES = 1_000
"""Number of episodes in the file: the ones that have waited longest."""
SLOWEST = 3
SLOW_SEC = 5.0
"""An episode that has waited for less is not named in the lines."""
PLACES: Mapping[WaitsFor, str] = {
    "start": "to start",
    "policy": "for the policy",
    "environment": "for the environment",
    "end": "to be released",
}

State = Literal["running", "pausing", "paused", "ending", "ended"]
"""`pausing`: no episode starts, and some are running; `paused`: no episode is running."""


@dataclass(frozen=True, slots=True)
class EpisodeStatus:
    """A running episode.

    Attributes:
        episode_id, task_name, attempt: As in its row.
        retry: Number of earlier tries of the attempt.
        waits_for: `start`, `policy`, `environment` or `end`.
        since: Start of that wait, in epoch seconds.
        started_at: Start of the episode, in epoch seconds.
        num_steps: Number of responses applied so far.
        tokens: Prompt and generated tokens so far.
        cost: US dollars so far.
    """

    episode_id: str
    task_name: str
    attempt: int
    retry: int
    waits_for: WaitsFor
    since: float
    started_at: float
    num_steps: int
    tokens: int
    cost: float


@dataclass(frozen=True, slots=True)
class Held:
    """A pause.

    Attributes:
        since: Start, in epoch seconds.
        now: Whether requests to the policy wait, too.
        until: Time when the run resumes by itself, in epoch seconds; `None`: it waits for an order.
        by: Author of the order.
        reason: The author's reason.
    """

    since: float
    now: bool
    until: float | None
    by: str
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run.

    Attributes:
        written_at: Epoch seconds.
        started_at: Start of this session, in epoch seconds.
        pid, hostname: The process of the run.
        state: `running`, `pausing`, `paused`, `ending` or `ended`.
        held: The pause by an order; `None` without one.
        outage: The causes of another pause: what cannot be reached; empty without one.
        concurrency: Maximum number of episodes at once.
        planned: Number of attempts of the run.
        done_before: Number of attempts that earlier sessions have done.
        expected: Number of tries of this session: attempts and retries.
        ended: Number of tries of this session that have ended.
        cut_short: Number of these that have no result, because they were cancelled or lost.
        queued: Number of tries that wait for a slot, or for their time.
        waiting: Number of running episodes, by what they wait for.
        reward: Mean reward of the run, earlier sessions included, and its interval: `[value, low, high]`, `None` if not
            known.
        tokens, cost: Usage of this session, running episodes included.
        tokens_per_sec: Mean since the session started.
        spent: Spending that counts towards the run's budget, over all its sessions.
        budget: The limits that are set.
        max_loop_lag_sec: The longest delay of the event loop.
        errors: The last errors, newest first.
        episodes: The running episodes, at most `MAX_EPISODES`.
        schema_version: Version of the format.
    """

    written_at: float
    started_at: float
    pid: int
    hostname: str
    state: State
    held: Held | None
    outage: str
    concurrency: int
    planned: int
    done_before: int
    expected: int
    ended: int
    cut_short: int
    queued: int
    waiting: dict[WaitsFor, int]
    reward: tuple[float | None, float | None, float | None]
    tokens: int
    cost: float
    tokens_per_sec: float
    spent: dict[str, float]
    budget: dict[str, float]
    max_loop_lag_sec: float
    errors: Sequence[str]
    episodes: Sequence[EpisodeStatus]
    schema_version: int = 1

    @property
    def running(self) -> int:
        """Number of running episodes."""
        return sum(self.waiting.values())

    def lines(self) -> Iterator[str]:
        """Yields the state in lines for people, without those about unknown values."""
        if self.held is not None:
            yield self._pause(self.held)
        if self.outage:
            yield f"paused: {self.outage}"
        if self.waiting:
            counts = sorted(self.waiting.items(), key=lambda one: -one[1])
            yield f"waiting {', '.join(f'{PLACES[what]}: {count}' for what, count in counts)}"
        value, low, high = self.reward
        totals = []
        if value is not None and low is not None and high is not None:
            totals.append(f"reward {format_number(value)} [{format_number(low)}, {format_number(high)}]")
        if self.cost:
            totals.append(f"${self.cost:,.4f}")
        if self.tokens:
            totals.append(f"{self.tokens:,} tokens, {self.tokens_per_sec:,.0f}/s")
        if totals:
            yield "; ".join(totals)
        now = self.written_at
        slow = sorted((one for one in self.episodes if now - one.since >= SLOW_SEC), key=lambda one: one.since)
        for one in slow[:SLOWEST]:
            yield (
                f"{one.task_name} (attempt {one.attempt}): step {one.num_steps}, "
                f"has waited {format_duration(now - one.since)} {PLACES[one.waits_for]}, "
                f"{format_duration(now - one.started_at)} in all"
            )
        yield from (f"error: {error}" for error in self.errors)

    def _pause(self, held: Held) -> str:
        what = "paused" if self.state == "paused" else "pausing: running episodes continue to their end"
        if held.now:
            what = "paused: requests to the policy wait"
        until = f", for {format_duration(held.until - self.written_at)} more" if held.until is not None else ""
        return f"{what}{until} (by {held.by}{f': {held.reason}' if held.reason else ''})"


_STATUS = TypeAdapter(RunStatus)


def write_status(path: Path, status: RunStatus) -> None:
    """Writes a state, atomically; a power cut may lose it. Blocking."""
    longest = sorted(status.episodes, key=lambda one: one.since)[:MAX_EPISODES]
    text = _STATUS.dump_json(replace(status, episodes=longest)).decode()
    with atomic_file(path, sync=False) as file:
        file.write(f"{mask_known_secrets(text)}\n".encode())


def read_status(path: Path) -> RunStatus | None:
    """Reads a state, which any process may have written; `None` if there is no valid one. Blocking."""
    try:
        return _STATUS.validate_json(read_record(path, max_bytes=MAX_BYTES))
    except (OSError, ConfigError, ValidationError):
        return None


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
        self.add_reward(result)
        if result.error is not None and result.reward is None and result.outcome not in UNFINISHED:
            sentence = f"{result.error.type} ({result.task_name}): {result.error.message}"
            self._errors.append(sentence[:MAX_ERROR_CHARS])

    def add_reward(self, result: EpisodeResult) -> None:
        """Counts the reward of an episode, if it has one. Earlier sessions may have run the episode."""
        if result.reward is not None:
            self._rewards.setdefault(result.task_name, []).append(result.reward)
            self._reward = None

    def expect_another(self) -> None:
        """Counts one more planned attempt."""
        self.planned += 1
        self.expected += 1

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
            outage=self.outage,
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
    def outage(self) -> str:
        """The causes of a pause that no order made."""
        return " ".join(filter(None, list(self._scheduler.holds.values())))

    @property
    def state(self) -> State:
        """How far the run is."""
        if self.has_ended:
            return "ended"
        if self._scheduler.interrupted:
            return "ending"
        if self._scheduler.paused:
            return "pausing" if self._scheduler.running else "paused"
        return "running"
