"""The state of a run in progress, which is written to `status.json`, and its display on the terminal.

The display has a bar and status lines on a terminal, and elsewhere a plain line every few seconds. A separate thread
draws it. It therefore stays current while the event loop is busy, and a slow terminal never delays an episode.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TextIO

from pydantic import TypeAdapter, ValidationError

from ares_exp.errors import ConfigError
from ares_exp.policies.episode_events import WaitsFor
from ares_exp.records.results import UNFINISHED, EpisodeResult, EpisodeUsage
from ares_exp.records.run_dir import atomic_file, read_record
from ares_exp.records.secrets import mask_known_secrets
from ares_exp.records.statistics.estimate import Estimate, mean_over_attempts
from ares_exp.records.terminal_text import format_duration, format_number, one_line, separator, wrap
from ares_exp.runs.budget import Budget, Spent

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ares_exp.runs.running_episode import RunningEpisode
    from ares_exp.runs.scheduler import Scheduler

MAX_BYTES = 16 * 2**20
MAX_EPISODES = 1_000
"""Maximum number of running episodes in `status.json`. If more are running, the episodes that wait longest are kept."""
SLOWEST = 3
SLOW_SEC = 5.0
"""Minimum wait of an episode, in seconds, for `RunStatus.lines` to list it as slow."""
PLACES: Mapping[WaitsFor, str] = {
    "start": "to start",
    "policy": "for the policy",
    "environment": "for the environment",
    "end": "to be released",
}

State = Literal["running", "pausing", "paused", "ending", "ended"]
"""State of a run.

`running`: Episodes start normally. `pausing`: No episode starts, but some are still running. `paused`: No episode
starts, and none is running. `ending`: The run was interrupted. `ended`: This session of the run is over.
"""


@dataclass(frozen=True, slots=True)
class EpisodeStatus:
    """The state of a running episode.

    Attributes:
        episode_id, task_name, attempt: Identification of the episode, as in its row of `episodes.jsonl`.
        retry: Number of earlier episodes of the same attempt.
        waits_for: Phase of the episode, named after what it waits for: `start`, `policy`, `environment` or `end`.
        since: Start of this phase, in epoch seconds.
        started_at: Start of the episode, in epoch seconds.
        num_steps: Number of responses that the episode has received so far.
        tokens: Number of prompt and generated tokens so far.
        cost: Cost so far, in US dollars.
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
    """A pause that a user requested.

    Attributes:
        since: Start of the pause, in epoch seconds.
        now: Whether requests to the policy are also paused.
        until: Time at which the run resumes automatically, in epoch seconds; `None` if the run stays paused until a
            user resumes it.
        by: User who requested the pause.
        reason: Reason that the user gave.
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
        written_at: Time at which this state was read, in epoch seconds.
        started_at: Start of this session, in epoch seconds.
        pid, hostname: Process id and host of the run.
        state: State of the run: `running`, `pausing`, `paused`, `ending` or `ended`.
        held: Pause that a user requested; `None` if no user has paused the run.
        outage: Reasons why the run has paused itself, such as an unreachable service; empty if it has not.
        concurrency: Maximum number of concurrent episodes.
        planned: Number of attempts that make up the whole run.
        done_before: Number of these attempts that earlier sessions have completed.
        expected: Number of episodes that this session has run or will run, for new attempts and for retries.
        ended: Number of episodes in this session that have ended.
        cut_short: Number of ended episodes that were cancelled or lost, and therefore have no result.
        queued: Number of episodes that wait for a free slot, or for the delay before a retry.
        waiting: Number of running episodes in each phase (`start`, `policy`, `environment` or `end`).
        reward: Mean reward of the run, including earlier sessions, and its interval: `[value, low, high]`. Unknown
            values are `None`.
        tokens, cost: Tokens and US dollars of this session, including running episodes.
        tokens_per_sec: Mean number of tokens per second since the session started.
        spent: Amounts of all sessions that count towards the run's budget.
        budget: Limits of the budget, by name. Limits that are not set are omitted.
        max_loop_lag_sec: Longest delay of the event loop so far, in seconds.
        errors: Latest errors, starting with the newest.
        episodes: Running episodes, at most `MAX_EPISODES`.
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
        """The number of running episodes."""
        return sum(self.waiting.values())

    def lines(self) -> Iterator[str]:
        """Yields lines for the terminal about pauses, waits, rewards, usage, slow episodes and errors, if known."""
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
                f"running for {format_duration(now - one.started_at)}"
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
    """Writes `status.json` atomically, with masked secrets. After a power cut, the file can be missing. Blocking."""
    longest = sorted(status.episodes, key=lambda one: one.since)[:MAX_EPISODES]
    text = _STATUS.dump_json(replace(status, episodes=longest)).decode()
    with atomic_file(path, sync=False) as file:
        file.write(f"{mask_known_secrets(text)}\n".encode())


def read_status(path: Path) -> RunStatus | None:
    """Reads a status file, whose content is not trusted. Returns `None` if it is missing or invalid. Blocking."""
    try:
        return _STATUS.validate_json(read_record(path, max_bytes=MAX_BYTES))
    except (OSError, ConfigError, ValidationError):
        return None


MAX_ERRORS = 2
MAX_ERROR_CHARS = 300

_HOSTNAME = socket.gethostname()


class LiveStatus:
    """The counts from which a run computes its current state.

    `add` counts episodes that have ended. `read`, which any thread can call, adds the running episodes and returns a
    `RunStatus`. The public attributes have the same meaning as in `RunStatus`, and are set by the run.
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
        self.budget: Callable[[], Budget] = Budget
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
        """Counts the reward of an episode, if it has one. The episode can be from an earlier session."""
        if result.reward is not None:
            self._rewards.setdefault(result.task_name, []).append(result.reward)
            self._reward = None

    def expect_another(self) -> None:
        """Counts an attempt that a trainer has requested during the run."""
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
        limits = asdict(self.budget())
        limits |= {f"sweep.{name}": value for name, value in limits.pop("sweep").items()}
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
        """The reasons why the run has paused itself, such as an unreachable service; empty if it has not."""
        return " ".join(filter(None, list(self._scheduler.holds.values())))

    @property
    def state(self) -> State:
        """The state of the run. `State` describes the values."""
        if self.has_ended:
            return "ended"
        if self._scheduler.interrupted:
            return "ending"
        if self._scheduler.paused:
            return "pausing" if self._scheduler.running else "paused"
        return "running"


_REDRAW_SEC = 0.2
_INDENT = "  "
_BAR_COLUMNS = 20
_LEAST_COLUMNS = 8
"""Minimum width, in columns, of the bar and of the list of task names. They are omitted if there is less room."""
_MAX_LINES = 2
"""Maximum number of terminal lines for each status line below the bar. The rest of a longer line is cut off."""
_STOP_TIMEOUT_SEC = 2.0


class Progress:
    """Shows the state of a run during the block, such as `3/12 done · 4 running · reward 0.67 · ETA 12 s`."""

    def __init__(
        self,
        status: Callable[[], RunStatus],
        *,
        stream: TextIO | None = None,
        is_tty: bool | None = None,
        interval_sec: float = 5.0,
        is_kept: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stores the arguments. Entering the context starts the display.

        `status` returns the state of the run, and is called in the drawing thread. If `stream` is not a terminal
        (detected by default), a line is written every `interval_sec` seconds. If `is_kept` is set, the last state
        remains visible after the end.
        """
        self._status = status
        self._stream = stream if stream is not None else sys.stderr
        if is_tty is None:
            is_tty = self._stream.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}
        self._is_tty = is_tty
        self._interval_sec = interval_sec
        self._is_kept = is_kept
        self._clock = clock
        self._separator = separator(self._stream)
        self._started_at = clock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._started_at = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join(_STOP_TIMEOUT_SEC)

    def line(self, status: RunStatus) -> str:
        """Formats a state as one line. Omits unknown values."""
        elapsed, done = self._clock() - self._started_at, status.ended - status.cut_short
        parts = [f"{done}/{status.expected} done"] if status.expected or not status.done_before else []
        if status.done_before:
            parts.append(f"{status.done_before} done before")
        if status.cut_short:
            parts.append(f"{status.cut_short} interrupted")
        if status.running:
            parts.append(f"{status.running} running")
        if status.held is not None or status.outage:
            parts.append(f"paused ({status.outage.rstrip('.')})" if status.outage and not self._is_tty else "paused")
        if status.reward[0] is not None:
            parts.append(f"reward {format_number(status.reward[0])}")
        if 0 < done < status.expected and not status.cut_short and status.held is None and not status.outage:
            parts.append(f"ETA {format_duration(elapsed / done * (status.expected - done))}")
        else:
            parts.append(format_duration(elapsed))
        return self._separator.join(parts)

    def _draw(self) -> None:
        # A closed terminal or pipe must not end the run.
        with contextlib.suppress(OSError, ValueError):
            if self._is_tty:
                self._draw_bar()
            else:
                self._print_lines()

    def _print_lines(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stopped.wait(self._interval_sec)
            if stopped and not self._is_kept:
                return
            self._stream.write(self.line(self._status()) + "\n")
            self._stream.flush()

    def _draw_bar(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream, force_terminal=True)
        live = Live(
            get_renderable=lambda: self._bar(console.width),
            console=console,
            auto_refresh=False,
            transient=not self._is_kept,
            # Output that is redirected to a file must still go to the file.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        with live, _log_lines_above(console):
            # The cursor stays visible, so that a killed process cannot leave it hidden.
            console.show_cursor(True)
            while not self._stopped.wait(_REDRAW_SEC):
                live.refresh()

    def _bar(self, width: int) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status = self._status()
        line = self.line(status)
        cells: list[RenderableType] = [Text(line)]
        room = width - len(line) - 1
        if room >= _LEAST_COLUMNS:
            columns, done = min(room, _BAR_COLUMNS), status.ended - status.cut_short
            cells.insert(0, ProgressBar(max(status.expected, 1), completed=done, width=columns))
            room -= columns + 1
        if room >= _LEAST_COLUMNS:
            names = ", ".join(dict.fromkeys(one.task_name for one in status.episodes))
            cells.append(Text(one_line(names, room), style="dim", no_wrap=True, overflow="ellipsis"))
        grid = Table.grid(*[""] * len(cells), padding=(0, 1))
        grid.add_row(*cells)
        if self._stopped.is_set():
            return grid
        below = []
        for text in status.lines():
            style = "red" if text.startswith("error: ") else "dim"
            parts = wrap(_INDENT + one_line(text, _MAX_LINES * width), width, max_lines=_MAX_LINES)
            below += [Text(part, style, no_wrap=True, overflow="ellipsis") for part in parts]
        return Group(grid, *below)


@contextlib.contextmanager
def _log_lines_above(console: Console) -> Iterator[None]:
    """Makes log records for the terminal appear above the bar. Otherwise, they would overwrite the bar."""
    from rich.file_proxy import FileProxy

    handlers = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
    streams = [(handler, handler.stream) for handler in handlers if handler.stream.isatty()]
    for handler, stream in streams:
        handler.setStream(FileProxy(console, stream))
    try:
        yield
    finally:
        for handler, stream in streams:
            handler.setStream(stream)
