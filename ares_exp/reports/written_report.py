"""The report as a file: the payload of its runs, and the trajectories that fit."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.records.run_dir import atomic_file
from ares_exp.reports.page import pack, packed_block, page_foot, page_head
from ares_exp.reports.page_redaction import redactor
from ares_exp.reports.run_payload import ShownRun, payload_of, readable
from ares_exp.reports.shown_episodes import failed, in_order
from ares_exp.reports.subject import Subject

MAX_BYTES = 25 * 10**6
BYTES_OF_A_ROW = 260
"""What the payload gets for an episode beside its row: the name of its block, or the command that shows it."""
MISSES = 20
"""After so many episodes in a row that did not fit, the file counts as full."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a report has.

    Attributes:
        size: Bytes.
        episodes: Rows.
        trajectories: Episodes whose steps it has.
        left_out: Recorded ones whose steps it has not.
    """

    size: int
    episodes: int
    trajectories: int
    left_out: int


def write_report(
    subject: Subject, out: Path, *, max_bytes: int = MAX_BYTES, which: str = "all", redact: Collection[str] = ()
) -> Written:
    """Writes a report; the file appears whole or not at all.

    Args:
        subject: What it shows.
        out: The file.
        max_bytes: Its size, up to which trajectories are put in.
        which: Whose: of `WHICH`.
        redact: What is hidden: of `redaction.KINDS`.

    Raises:
        ConfigError: A record is broken.
        OSError: It cannot be written.
    """
    hide = redactor(redact, [run.path for run in subject.runs.values()])
    runs = [run.payload(name=name) for name, run in subject.runs.items()]
    payload = hide(payload_of(runs, **subject.more, redacted=list(redact)))
    head = page_head(str(hide(str(subject.path)))).encode()
    rows = sum(len(run["episodes"]) for run in runs)
    choice = _Choice(max_bytes - len(head) - len(page_foot(payload).encode()) - BYTES_OF_A_ROW * rows, hide)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out, sync=False) as file:
        file.write(head)
        for block in choice.blocks(subject, which):
            file.write(block.encode())
        for number, run in enumerate(payload["runs"]):
            run |= {"blocks": choice.names.get(number, {}), "left_out": hide(choice.left_out.get(number, []))}
        file.write(page_foot(payload).encode())
        size = file.tell()
    trajectories = sum(map(len, choice.names.values()))
    return Written(size, rows, trajectories, sum(map(len, choice.left_out.values())))


@dataclass(slots=True)
class _Choice:
    """Chooses trajectories until a number of bytes is used up.

    Attributes:
        left: Bytes.
        hide: Redacts a payload.
        names: Of the blocks, by run and episode.
        left_out: What is not in the file, by run: its id, why, and the command that shows it.
    """

    left: int
    hide: Callable[[Any], Any]
    names: dict[int, dict[str, str]] = field(default_factory=dict)
    left_out: dict[int, list[Mapping[str, str]]] = field(default_factory=dict)
    _misses: int = 0

    def blocks(self, subject: Subject, which: str) -> Iterator[str]:
        """Yields the blocks; the runs take turns, so that each shows what helps most."""
        queues = [
            (number, run, self._wanted(number, run, which, subject.first_tasks))
            for number, run in enumerate(subject.runs.values())
        ]
        for place in range(max((len(ids) for _, _, ids in queues), default=0)):
            for number, run, ids in queues:
                if place < len(ids) and (block := self._block(number, run, ids[place])) is not None:
                    yield block

    def _wanted(self, number: int, run: ShownRun, which: str, first_tasks: Collection[str]) -> list[str]:
        recorded = run.stored.keys()
        ids = in_order(run.summary, recorded, first_tasks=first_tasks)
        wanted = set() if which == "none" else failed(run.summary, recorded) if which == "failed" else set(recorded)
        for episode_id in ids:
            if episode_id not in wanted:
                self._leave_out(number, run, episode_id, f"not asked for (--episodes {which})")
        return [episode_id for episode_id in ids if episode_id in wanted]

    def _block(self, number: int, run: ShownRun, episode_id: str) -> str | None:
        if self._misses >= MISSES:
            self._leave_out(number, run, episode_id, "the file is full (--max-mb)")
            return None
        episode = readable(run, episode_id)
        if isinstance(episode, str):
            self._leave_out(number, run, episode_id, episode)
            return None
        name = f"e{number}-{len(self.names.get(number, {}))}"
        block = packed_block(name, pack(self.hide(episode)))
        if len(block) > self.left:
            self._misses += 1
            self._leave_out(number, run, episode_id, "it does not fit (--max-mb)")
            return None
        self._misses = 0
        self.left -= len(block)
        self.names.setdefault(number, {})[episode_id] = name
        return block

    def _leave_out(self, number: int, run: ShownRun, episode_id: str, why: str) -> None:
        command = f"ares-exp show {shlex.quote(str(run.path / episode_id))}"
        self.left_out.setdefault(number, []).append({"id": episode_id, "why": why, "command": command})
