"""Runs of 30 episodes at once that are paused, and killed meanwhile: nothing is asked twice, nothing is lost.

`python -m tests.soak.held_runs [BACKEND]` prints a line for each.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ares_exp.control.status import RunStatus, read_status
from ares_exp.ctl.command_line import main as ctl
from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import PLAIN, KilledRun, make_tasks

AT_ONCE, PLANNED = 30, 45
PATIENCE_SEC = 600.0
PAUSE_SEC, LIMIT_SEC = 20.0, 5.0
"""How long a run is held, and how long its agents may take."""


Played = tuple[KilledRun, Future[int]]


@contextmanager
def played(folder: Path, backend: str, *overrides: str, at_once: int = AT_ONCE) -> Iterator[Played]:
    """A run with so many episodes under way, each with a request that is not answered."""
    folder.mkdir()
    make_tasks(folder, (PLAIN,) * 3)
    with CountingEndpoint() as endpoint, ThreadPoolExecutor(1) as pool:
        words = (f"concurrency={at_once}", f"attempts={PLANNED // 3}", "policy.max_concurrency=100", *overrides)
        run = KilledRun(folder, endpoint, backend, words, PATIENCE_SEC)
        endpoint.answering.clear()
        reached = endpoint.when(at_once)
        playing = pool.submit(run.begin)
        try:
            until(playing, reached.is_set)
            yield run, playing
        finally:
            endpoint.answering.set()
            if not playing.done():
                os.kill(run.pids[-1], signal.SIGKILL)


def until(playing: Future[int], is_so: Callable[[], object]) -> None:
    """Waits; fails where the run ends before."""
    deadline = time.monotonic() + PATIENCE_SEC
    while not is_so():
        assert not playing.done(), "the run has ended before"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def status(run: KilledRun) -> RunStatus:
    """The state that it has told."""
    found = read_status(run.path / "status.json")
    assert found is not None
    return found


def order(run: KilledRun, *words: str) -> None:
    """Gives an order by the command."""
    assert ctl([str(run.path), *words, "--wait", "60"]) == 0, words


def killed_and_resumed(run: KilledRun, playing: Future[int]) -> str:
    """Kills the driver, resumes the run, and checks that every turn was asked for once, and all attempts ended."""
    before, rows = run.endpoint.asked.total(), len(run.all_rows)
    os.kill(run.pids[-1], signal.SIGKILL)
    assert playing.result() == -signal.SIGKILL, run.said
    assert run.resume() == 0, run.said
    return f"killed after {before} requests and {rows} rows; resumed: {counted(run)}"


def counted(run: KilledRun) -> str:
    """Checks a run that has ended."""
    twice = [turn for turn, times in run.endpoint.asked.items() if times > 1]
    outcomes = {row["outcome"] for row in run.final.values()}
    assert (twice, len(run.final), outcomes) == ([], PLANNED, {"completed"}), (twice, len(run.final), outcomes)
    assert run.left() == []
    return f"{run.endpoint.asked.total()} requests, none twice, {PLANNED} of {PLANNED} attempts scored"


def drained(folder: Path, backend: str) -> str:
    """Pauses it; all that play end, nothing begins, and it is killed then."""
    with played(folder, backend) as (run, playing):
        order(run, "pause")
        run.endpoint.answering.set()
        until(playing, lambda: status(run).state == "paused")
        assert (status(run).running, status(run).queued, len(run.all_rows)) == (0, PLANNED - AT_ONCE, AT_ONCE)
        return f"pause: {killed_and_resumed(run, playing)}"


def held(folder: Path, backend: str) -> str:
    """Pauses it `--now`; what was asked is answered, nothing more is asked, and it is killed then."""
    with played(folder, backend) as (run, playing):
        order(run, "pause", "--now")
        run.endpoint.answering.set()
        until(playing, lambda: sum(one.num_steps for one in status(run).episodes) == AT_ONCE)
        time.sleep(PAUSE_SEC / 4)
        assert run.endpoint.asked.total() == AT_ONCE
        return f"pause --now: {killed_and_resumed(run, playing)}"


def without_limits(folder: Path, backend: str) -> str:
    """Holds it for longer than its agents may take; few at once, so that what is not held is well within the limit."""
    with played(folder, backend, f"agent_timeout_sec={LIMIT_SEC:g}", at_once=2) as (run, playing):
        order(run, "pause", "--now")
        run.endpoint.answering.set()
        asked = run.endpoint.asked.total()
        time.sleep(PAUSE_SEC)
        assert run.endpoint.asked.total() == asked
        order(run, "resume")
        assert playing.result() == 0, run.said
        paused = sorted(row["phase_sec"].get("paused", 0.0) for row in run.all_rows)
        assert paused[-2] > LIMIT_SEC
        return f"{PAUSE_SEC:g} s held, limit {LIMIT_SEC:g} s: {counted(run)}; two were held for {paused[-2]:.1f} s"


def main() -> None:
    """Prints the lines."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "local"
    with tempfile.TemporaryDirectory(prefix="held-") as temporary:
        for measured in (drained, held, without_limits):
            print(measured(Path(temporary) / measured.__name__, backend), flush=True)


if __name__ == "__main__":
    main()
