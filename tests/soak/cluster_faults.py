"""Hosts killed and nodes cut off, many times, while runs are run on a cluster of three nodes.

`python -m tests.soak.cluster_faults [KILLS] [CUTS] [SEED]` runs runs until so many hosts were killed, at random
moments, and so many nodes have lost their power; it prints a line for each. After each run everything is checked that
`tests/ray` checks after one fault.
"""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import KilledRun, check, make_tasks
from tests.leaks import processes
from tests.ray.cluster import SmallCluster
from tests.ray.runs import PATIENCE_SEC, ran

NODES = 3
CONCURRENCY = 6
LEASE_SEC = 20.0
BOX_SEC = 5.0
"""Seconds after which no container of a killed host is left."""
PAUSE_SEC = (0.2, 4.0)
"""Between two harms, at least and at most."""


class Box(NamedTuple):
    """A process of a container, whatever becomes of its parents."""

    pid: int
    started: str


class Harm:
    """Harms a cluster while runs are run on it.

    Attributes:
        todo: Remaining faults, in this order.
        done: Number of faults by kind.
        left: Processes of containers that outlived their bound.
    """

    def __init__(self, cluster: SmallCluster, todo: Sequence[str], rng: random.Random) -> None:
        self.todo = [*todo]
        self.done: Counter[str] = Counter()
        self.left: list[Box] = []
        self._cluster, self._rng = cluster, rng
        rng.shuffle(self.todo)

    def during(self, running: Future[int]) -> int:
        """Harms hosts with containers until the run has ended; returns how often.

        It uses the main thread: Ray adds nodes only there.
        """
        before, size = self.done.total(), len(self._cluster.nodes)
        while self.todo and not running.done():
            time.sleep(self._rng.uniform(*PAUSE_SEC))
            nodes = [node for node in self._cluster.nodes if self.busy_hosts(node)]
            if nodes and not running.done():
                self.done[what := self.todo.pop()] += 1
                self.do(what, self._rng.choice(nodes))
                while len(self._cluster.nodes) < size:
                    self._cluster.add()
        return self.done.total() - before

    def busy_hosts(self, node: Any) -> list[psutil.Process]:
        return [host for host in self._cluster.hosts(node) if boxes_in(host)]

    def do(self, what: str, node: Any) -> None:
        hosts = self.busy_hosts(node)
        boxes = [box for host in hosts for box in boxes_in(host)]
        if what == "cut":
            self._cluster.cut_power(node)
        for host in hosts:
            with contextlib.suppress(psutil.NoSuchProcess):
                host.kill()
        time.sleep(BOX_SEC)
        self.left += living(boxes)


def living(boxes: Iterable[Box]) -> set[Box]:
    return {*boxes} & {Box(pid, started) for pid, _, started, _ in processes()}


def boxes_in(host: psutil.Process) -> list[Box]:
    family, found = {host.pid}, list(processes())
    while more := {pid for pid, parent, _, _ in found if parent in family} - family:
        family |= more
    return [Box(pid, started) for pid, _, started, _ in found if pid in family - {host.pid}]


def soak(cluster: SmallCluster, harm: Harm, lease_sec: float = LEASE_SEC) -> int:
    """Runs runs until everything has happened. Returns 1 if anything was not as it must be."""
    failed, runs, told = 0, 0, Counter[str]()
    folder = Path(tempfile.mkdtemp(prefix="cluster-faults-"))
    overrides = (
        *("executor=ray", f"executor.address={cluster.address}", "executor.resources={run: 1}"),
        *(f"executor.lease_sec={lease_sec:g}", "executor.lost_per_attempt=1000"),
        f"executor.join_timeout_sec={PATIENCE_SEC:g}",
    )
    try:
        with long_run(folder / "whole") as whole:
            assert whole.start() == 0, whole.said
        while harm.todo:
            runs, started = runs + 1, time.monotonic()
            with long_run(folder / f"run-{runs}", *overrides) as run:
                try:
                    with ran(run.start) as running:
                        run.kills = harm.during(running)
                        assert running.result() == 0, run.said
                    check(run, whole, concurrency=CONCURRENCY)
                except (AssertionError, OSError, subprocess.TimeoutExpired):
                    failed += 1
                    print(f"FAILED: {traceback.format_exc()}\n{run.said}", flush=True)
            told["rows"] += len(run.all_rows)
            told["lost"] += sum(row["outcome"] == "lost" for row in run.all_rows)
            told["calls paid twice"] += run.endpoint.asked.total() - len(run.endpoint.asked)
            took = f"{time.monotonic() - started:.0f} s, load {os.getloadavg()[0]:.0f}"
            print(f"run {runs}: {dict(harm.done)}, {dict(told)}, {took}", flush=True)
        at_the_end = [words for _, _, _, words in processes() if "bwrap" in words and str(folder) in words]
        print(
            f"{dict(harm.done)} in {runs} runs, {failed} failed; processes of containers that lived too long: "
            f"{len(harm.left)}; at the end: {len(at_the_end)}"
        )
    finally:
        cluster.close()
    return int(bool(failed or harm.left or at_the_end))


@contextmanager
def long_run(directory: Path, *overrides: str) -> Iterator[KilledRun]:
    directory.mkdir(parents=True)
    make_tasks(directory)
    endpoint = CountingEndpoint(turns=(20, 28), latency_sec=0.5)
    with endpoint:
        overrides = (*overrides, f"concurrency={CONCURRENCY}")
        yield KilledRun(directory, endpoint, overrides=overrides, patience_sec=3 * PATIENCE_SEC)


def main(kills: int, cuts: int, seed: int) -> int:
    cluster = SmallCluster(NODES)
    return soak(cluster, Harm(cluster, [*["kill"] * kills, *["cut"] * cuts], random.Random(seed)))


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    raise SystemExit(main(*(*given, *(50, 20, 0)[len(given) :])))
