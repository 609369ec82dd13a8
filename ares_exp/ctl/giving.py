"""Delivery of orders to runs and sweeps, and their outcomes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.control.orders import OF_EPISODES, Order, give, record
from ares_exp.control.stop_file import stop
from ares_exp.ctl.targets import POLL_SEC, RunTarget, SweepTarget
from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import RunDir, append_lines, open_regular

MAX_TAIL = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of an order.

    Attributes:
        path: The run.
        outcome: `done`, `refused`, `failed`, or `not taken`.
        says: In a sentence.
    """

    path: Path
    outcome: str
    says: str


def give_to_run(run: RunTarget, order: Order, *, wait_sec: float) -> Answer:
    """Gives an order to a run, and waits for its outcome. Blocking.

    Raises:
        ConfigError: The run is not under way.
    """
    if not run.is_under_way:
        raise ConfigError(f"Expected a run that is under way, but {run.path} is not: {run.state}.{_remedy(order, run)}")
    records = _Records(run.path)
    path = give(RunDir(run.path).control, order)
    answer = _answered(run, records, order, wait_sec)
    if answer.outcome == "not taken" and not run.is_under_way:
        path.unlink(missing_ok=True)
        return Answer(run.path, "not taken", "The run ended before.")
    return answer


def give_to_sweep(sweep: SweepTarget, order: Order, *, wait_sec: float) -> list[Answer]:
    """Gives an order to all jobs of a sweep, those that begin later included; waits for those under way. Blocking.

    Raises:
        ConfigError: The sweep is not under way, or the order is for one run.
    """
    jobs = [job for job in sweep.jobs if job.is_under_way]
    if order.verb in OF_EPISODES:
        named = ", ".join(str(job.path) for job in jobs) or "none now"
        raise ConfigError(f"Expected one job for `{order.verb}`, got the sweep {sweep.path}. Jobs under way: {named}.")
    if not sweep.is_under_way:
        raise ConfigError(f"Expected a sweep that is under way, but no process plays {sweep.path}.")
    records = {job.path: _Records(job.path) for job in jobs}
    folder = RunDir(sweep.path)
    if order.verb == "stop":
        stop(sweep.path)
    else:
        give(folder.control, order)
    append_lines(folder.orders, record(order, "done", "Given to all jobs.", uid=None, at=time.time()))
    if order.verb == "stop":
        return [Answer(job.path, "done", "Its episodes under way are ended.") for job in jobs]
    deadline = time.monotonic() + wait_sec
    return [_answered(job, records[job.path], order, deadline - time.monotonic()) for job in jobs]


def _remedy(order: Order, run: RunTarget) -> str:
    if order.verb in ("set", "retry"):
        return f" Go on with it by `ares-exp resume={run.path}`, with what is to be set."
    return ""


def _answered(run: RunTarget, records: _Records, order: Order, wait_sec: float) -> Answer:
    deadline = time.monotonic() + wait_sec
    while True:
        for line in records.new():
            if line.get("id") == order.id:
                return Answer(run.path, str(line.get("outcome")), str(line.get("says")))
        if time.monotonic() > deadline:
            return Answer(run.path, "not taken", f"It was not answered within {wait_sec:.0f} s.")
        time.sleep(POLL_SEC)


class _Records:
    """What is appended to `control.jsonl` of a run from now on."""

    def __init__(self, run: Path) -> None:
        self._path = RunDir(run).orders
        try:
            self._at = self._path.stat().st_size
        except OSError:
            self._at = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the new whole lines that are objects."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._at)
                found = file.read(MAX_TAIL)
        except OSError:
            return
        whole = found[: found.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(data, dict):
                yield data
