"""Hosts killed and nodes cut off, many times, while runs are played on a cluster of three nodes.

`python -m tests.soak.cluster_faults [KILLS] [CUTS]` plays runs until so many hosts were killed, at random moments, and
so many nodes have lost their power. After each run everything is checked that `tests/ray` checks after one fault.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import KilledRun, check, make_tasks
from tests.leaks import processes
from tests.ray.cluster import SmallCluster

LEASE_SEC = 20.0
BOX_SEC = 5.0
"""Seconds after which no container of a killed host is left."""


class Harm:
    """Harms a cluster from a thread while a run is played on it.

    Attributes:
        done: How often what was done.
        left: Boxes that were there longer than they may be after a kill.
    """

    def __init__(self, cluster: SmallCluster, kills: int, cuts: int, rng: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self.left: list[str] = []
        self._cluster, self._rng = cluster, rng
        self._todo = [*["kill"] * kills, *["cut"] * cuts]
        rng.shuffle(self._todo)
        self._stop = threading.Event()

    @property
    def is_over(self) -> bool:
        return not self._todo

    def begin(self, run: KilledRun) -> None:
        self._stop.clear()
        self._run = run
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def end(self) -> int:
        """Ends it; returns how much was done in this run."""
        self._stop.set()
        self._thread.join()
        return self._in_this_run

    def _go_on(self) -> None:
        self._in_this_run = 0
        while self._todo and not self._stop.wait(self._rng.uniform(0.2, 2.0)):
            hosts = self._cluster.hosts()
            if not hosts or not self._run.endpoint.asked:
                continue
            what = self._todo.pop()
            if what == "kill":
                host = self._rng.choice(hosts)
                boxes = [child for child in host.children(recursive=True) if child.name() == "bwrap"]
                host.kill()
                time.sleep(BOX_SEC)
                self.left += [str(box) for box in boxes if box.is_running()]
            else:
                self._cluster.cut_power(self._rng.choice(self._cluster.nodes))
                self._cluster.add()
            self.done[what] += 1
            self._in_this_run += 1


def main(kills: int, cuts: int) -> None:
    """Plays runs until everything has happened."""
    rng = random.Random(0)
    cluster = SmallCluster(3)
    folder = Path(tempfile.mkdtemp(prefix="cluster-faults-"))
    overrides = (
        *("executor=ray", f"executor.address={cluster.address}", "executor.resources={play: 1}"),
        *(f"executor.lease_sec={LEASE_SEC}", "executor.lost_per_attempt=1000"),
    )
    try:
        whole = _begun(folder / "whole", ())
        harm, runs, rows, lost, twice = Harm(cluster, kills, cuts, rng), 0, 0, 0, 0
        while not harm.is_over:
            runs += 1
            run = _made(folder / f"run-{runs}", overrides)
            with run.endpoint:
                harm.begin(run)
                code = run.begin()
                run.kills = harm.end()
                assert code == 0, run.said
                check(run, whole)
            rows += len(run.all_rows)
            lost += sum(row["outcome"] == "lost" for row in run.all_rows)
            twice += run.endpoint.asked.total() - len(run.endpoint.asked)
            print(f"run {runs}: {dict(harm.done)}, {rows} rows, {lost} lost, {twice} calls paid twice", flush=True)
        boxes = [words for _, _, _, words in processes() if "bwrap" in words and str(folder) in words]
        print(
            f"{dict(harm.done)} in {runs} runs; boxes after {BOX_SEC:g} s: {len(harm.left)}; at the end: {len(boxes)}"
        )
    finally:
        cluster.close()


def _made(directory: Path, overrides: tuple[str, ...]) -> KilledRun:
    directory.mkdir(parents=True)
    make_tasks(directory)
    endpoint = CountingEndpoint(turns=(10, 16), latency_sec=0.3)
    return KilledRun(directory, endpoint, overrides=(*overrides, "concurrency=6"))


def _begun(directory: Path, overrides: tuple[str, ...]) -> KilledRun:
    run = _made(directory, overrides)
    with run.endpoint:
        assert run.begin() == 0, run.said
    return run


if __name__ == "__main__":
    main(*(int(word) for word in (*sys.argv[1:3], *("50", "20")[len(sys.argv) - 1 :])))
