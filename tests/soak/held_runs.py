"""Runs of many episodes at once that are paused, and killed meanwhile: nothing is asked twice, nothing is lost.

`python -m tests.soak.held_runs [docker|local|ray] [AT_ONCE]` prints a line for each; `ray`: on a cluster of two nodes.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ares_exp.commands.cli.run_command import run_module
from ares_exp.runs.control.status import RunStatus, read_status
from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import PLAIN, KilledRun, make_tasks
from tests.leaks import wait_until

AT_ONCE = 30
PATIENCE_SEC = 600.0
PAUSE_SEC, LIMIT_SEC = 20.0, 5.0
"""How long a run is held, and how long its agents may take."""


Played = tuple[KilledRun, Future[int]]


@dataclass(frozen=True)
class Case:
    """What is played.

    Attributes:
        folder: Where.
        backend: Of the containers.
        at_once: Episodes at once; half as many again wait.
        overrides: More of the command line.
    """

    folder: Path
    backend: str
    at_once: int
    overrides: Sequence[str] = ()

    @property
    def attempts(self) -> int:
        """Of each of the three tasks."""
        return self.at_once // 2


@contextmanager
def played(case: Case) -> Iterator[Played]:
    """A run with so many episodes in progress, each with a request that is not answered."""
    folder = case.folder
    folder.mkdir()
    make_tasks(folder, (PLAIN,) * 3)
    with CountingEndpoint() as endpoint, ThreadPoolExecutor(1) as pool:
        limits = (f"concurrency={case.at_once}", f"attempts={case.attempts}", "policy.max_concurrency=100")
        run = KilledRun(folder, endpoint, case.backend, (*limits, *case.overrides), PATIENCE_SEC)
        endpoint.answering.clear()
        reached = endpoint.when(case.at_once)
        playing = pool.submit(run.start)
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
    assert run_module("ares_exp.commands.ctl", [str(run.path), *words, "--wait", "60"], "ctl") == 0, words


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
    planned = run.summary["planned"]
    assert (twice, len(run.final), outcomes) == ([], planned, {"completed"}), (twice, len(run.final), outcomes)
    assert wait_until(lambda: run.left() == []), run.left()
    return f"{run.endpoint.asked.total()} requests, none twice, {len(run.final)} of {planned} attempts scored"


def drained(case: Case) -> str:
    """Pauses it; all that play end, nothing starts, and it is killed then."""
    with played(case) as (run, playing):
        order(run, "pause")
        run.endpoint.answering.set()
        until(playing, lambda: status(run).state == "paused")
        found = status(run).running, status(run).queued, len(run.all_rows)
        assert found == (0, 3 * case.attempts - case.at_once, case.at_once), found
        return f"pause: {killed_and_resumed(run, playing)}"


def held(case: Case) -> str:
    """Pauses it `--now`; what was asked is answered, nothing more is asked, and it is killed then."""
    with played(case) as (run, playing):
        order(run, "pause", "--now")
        run.endpoint.answering.set()
        until(playing, lambda: sum(one.num_steps for one in status(run).episodes) == case.at_once)
        time.sleep(PAUSE_SEC / 4)
        assert run.endpoint.asked.total() == case.at_once
        return f"pause --now: {killed_and_resumed(run, playing)}"


def without_limits(case: Case) -> str:
    """Holds it for longer than its agents may take; few at once, so that what is not held is well within the limit."""
    limited = replace(case, at_once=2, overrides=(*case.overrides, f"timeouts.agent={LIMIT_SEC:g}"))
    with played(limited) as (run, playing):
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
    at_once = int(sys.argv[2]) if len(sys.argv) > 2 else AT_ONCE
    with tempfile.TemporaryDirectory(prefix="held-") as temporary, ExitStack() as stack:
        overrides: Sequence[str] = ()
        if backend == "ray":
            from tests.ray.cluster import SmallCluster
            from tests.ray.runs import on

            cluster = SmallCluster(2)
            stack.callback(cluster.close)
            backend, overrides = "local", on(cluster)
        for measured in (drained, held, without_limits):
            folder = Path(temporary) / measured.__name__
            print(measured(Case(folder, backend, at_once, overrides)), flush=True)


if __name__ == "__main__":
    main()
