"""The state of a run or a sweep, as text and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ares_exp.control.status import RunStatus
from ares_exp.control.status_lines import PLACES, status_lines
from ares_exp.ctl.targets import RunTarget
from ares_exp.terminal.terminal import format_duration, one_line

SHOWN = 20


def as_json(run: RunTarget, status: RunStatus | None) -> dict[str, Any]:
    """Returns the state of a run, JSON-ready."""
    return {"path": str(run.path), "state": run.state, "status": asdict(status) if status is not None else None}


def run_lines(run: RunTarget, status: RunStatus | None, *, is_job: bool = False) -> Iterator[str]:
    """Yields the state of a run in lines; of a job of a sweep without its episodes."""
    state = run.state
    if status is None or state != "under way":
        yield f"{run.path}: {state}"
        return
    yield (
        f"{run.path}: {status.state}, {status.running} of at most {status.concurrency} episodes under way, "
        f"{status.queued} queued, {status.ended} ended"
    )
    if is_job:
        return
    yield from (f"  {one_line(line, 200)}" for line in status_lines(status))
    yield from (f"  budget.{name}={limit:g}: {_spent(status, name)}" for name, limit in status.budget.items())
    shown = sorted(status.episodes, key=lambda one: one.since)[:SHOWN]
    for one in shown:
        waited = format_duration(status.written_at - one.since)
        place = PLACES.get(one.waits_for, "to be released")
        yield (
            f"  {one_line(one.episode_id)}  step {one.num_steps}, {one.tokens:,} tokens, ${one.cost:.4f}, "
            f"waits {place} for {waited}"
        )
    if status.running > len(shown):
        yield f"  and {status.running - len(shown):,} more (--json lists them)"
    age = time.time() - status.written_at
    yield f"  told {format_duration(age)} ago by process {status.pid} on {one_line(status.hostname)}"


def _spent(status: RunStatus, name: str) -> str:
    spent = status.spent.get(name)
    return f"{spent:g} spent" if spent is not None else "of all jobs together"
