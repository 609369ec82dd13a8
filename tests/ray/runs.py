"""Runs that are played on a cluster, and the same one without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import KilledRun, make_tasks
from tests.leaks import wait_until
from tests.ray.cluster import SmallCluster

LEASE_SEC = 8.0
PATIENCE_SEC = 240.0
"""For a machine many times slower than one on which it takes a second or two."""


def on(cluster: SmallCluster, *more: str) -> tuple[str, ...]:
    """Overrides that have a run play on the cluster."""
    return (
        "executor=ray",
        f"executor.address={cluster.address}",
        "executor.resources={play: 1}",
        f"executor.lease_sec={LEASE_SEC:g}",
        *more,
    )


@contextmanager
def made(directory: Path, *overrides: str, latency_sec: float = 0.03) -> Iterator[KilledRun]:
    """A run that has not begun, with its tasks and its endpoint."""
    directory.mkdir(exist_ok=True)
    make_tasks(directory)
    with CountingEndpoint(latency_sec=latency_sec) as endpoint:
        yield KilledRun(directory, endpoint, overrides=overrides, patience_sec=PATIENCE_SEC)


@contextmanager
def played(run: KilledRun) -> Iterator[Future[int]]:
    """Has a run played in a thread, while the main one harms it: Ray adds nodes there alone."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run.begin)


def until(playing: Future[int], condition: Callable[[], object]) -> None:
    """Waits until it is so, as long as the run is played."""
    wait_until(lambda: playing.done() or bool(condition()), PATIENCE_SEC)
    assert not playing.done(), "the run has ended before"


def busy_host(cluster: SmallCluster) -> psutil.Process | None:
    """A host with a box, if there is one."""
    for host in cluster.hosts():
        try:
            if any(child.name() == "bwrap" for child in host.children(recursive=True)):
                return host
        except psutil.NoSuchProcess:
            continue
    return None
