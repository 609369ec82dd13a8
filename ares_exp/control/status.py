"""The state of a run under way: `status.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_record
from ares_exp.records.run_dir import atomic_file
from ares_exp.records.secrets import mask_known_secrets

SCHEMA_VERSION = 1
MAX_BYTES = 16 * 2**20
MAX_EPISODES = 1_000
"""Episodes that are listed: those that have waited longest go first."""

State = Literal["under way", "pausing", "paused", "ending", "ended"]
"""`pausing`: nothing new begins, and something plays still; `paused`: nothing plays (quiesced)."""


@dataclass(frozen=True, slots=True)
class EpisodeStatus:
    """An episode under way.

    Attributes:
        episode_id, task_name, attempt: As in its row.
        retry: Number of earlier tries of the attempt.
        waits_for: `start`, `policy`, `environment` or `end`.
        since: Start of that wait, in epoch seconds.
        began: Start of the episode, in epoch seconds.
        num_steps: Number of answers applied so far.
        tokens: Prompt and generated tokens so far.
        cost: US dollars so far.
    """

    episode_id: str
    task_name: str
    attempt: int
    retry: int
    waits_for: str
    since: float
    began: float
    num_steps: int
    tokens: int
    cost: float

    @property
    def title(self) -> str:
        """Its task and attempt, for people."""
        return f"{self.task_name} (attempt {self.attempt})"


@dataclass(frozen=True, slots=True)
class Held:
    """A pause.

    Attributes:
        since: Epoch seconds.
        now: Whether the policy is asked for nothing, too.
        until: When the run resumes by itself, in epoch seconds; `None`: when it is told.
        by: Who asked for it.
        reason: Why.
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
        began: Start of this session, in epoch seconds.
        pid, hostname: Of its process.
        state: `under way`, `pausing`, `paused`, `ending` or `ended`.
        held: The pause; `None` without one.
        concurrency: Maximum number of episodes at once.
        planned: Number of attempts of the run.
        ended: Number of tries of this session that have ended.
        queued: Number of tries that wait for a slot, or for their time.
        waiting: Number of episodes under way, by what they wait for.
        reward: Mean reward of this session, and its interval: `[value, low, high]`, `None` where not known.
        tokens, cost: Of this session, episodes under way included.
        tokens_per_sec: Since the session began.
        spent: What counts towards the run's budget, over all its sessions.
        budget: The limits on that, those that are set.
        max_loop_lag_sec: The longest that the event loop was late.
        errors: The last errors, newest first.
        episodes: Those under way, at most `MAX_EPISODES`.
        schema_version: Of the format.
    """

    written_at: float
    began: float
    pid: int
    hostname: str
    state: State
    held: Held | None
    concurrency: int
    planned: int
    ended: int
    queued: int
    waiting: dict[str, int]
    reward: tuple[float | None, float | None, float | None]
    tokens: int
    cost: float
    tokens_per_sec: float
    spent: dict[str, float]
    budget: dict[str, float]
    max_loop_lag_sec: float
    errors: Sequence[str]
    episodes: Sequence[EpisodeStatus]
    schema_version: int = SCHEMA_VERSION

    @property
    def running(self) -> int:
        """Number of episodes under way."""
        return sum(self.waiting.values())


def write_status(path: Path, status: RunStatus) -> None:
    """Writes a state, atomically; the last one may be lost in a power cut. Blocking."""
    with atomic_file(path, sync=False) as file:
        file.write(_text(status).encode())


def _text(status: RunStatus) -> str:
    episodes = sorted(status.episodes, key=lambda one: one.since)[:MAX_EPISODES]
    columns = [field.name for field in fields(EpisodeStatus)]
    rows = [{name: getattr(one, name) for name in columns} for one in episodes]
    head = {field.name: getattr(status, field.name) for field in fields(status)}
    head["held"] = asdict(status.held) if status.held is not None else None
    return mask_known_secrets(json.dumps({**head, "episodes": rows}, separators=(",", ":"), default=str)) + "\n"


def read_status(path: Path) -> RunStatus | None:
    """Reads a state, which anybody may have written; `None` where there is none that can be read. Blocking."""
    try:
        return _STATUS.validate_json(read_record(path, max_bytes=MAX_BYTES))
    except (OSError, ConfigError, ValidationError):
        return None


_STATUS = TypeAdapter(RunStatus)
