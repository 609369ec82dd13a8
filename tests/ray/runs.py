"""Runs that are run on a cluster, and the same one without."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import KilledRun, make_tasks
from tests.ray.cluster import SmallCluster

LEASE_SEC = 20.0
PATIENCE_SEC = 240.0
"""For a machine many times slower than one on which it takes a second or two."""


Found = TypeVar("Found")


def on(cluster: SmallCluster, *more: str) -> tuple[str, ...]:
    """Overrides that have a run continue the cluster."""
    return (
        "executor=ray",
        f"executor.address={cluster.address}",
        "executor.resources={run: 1}",
        f"executor.lease_sec={LEASE_SEC:g}",
        f"executor.join_timeout_sec={PATIENCE_SEC:g}",
        *more,
    )


@contextmanager
def made(directory: Path, *overrides: str, latency_sec: float = 0.03) -> Iterator[KilledRun]:
    directory.mkdir(exist_ok=True)
    make_tasks(directory)
    with CountingEndpoint(latency_sec=latency_sec) as endpoint:
        yield KilledRun(directory, endpoint, overrides=overrides, patience_sec=PATIENCE_SEC)


@contextmanager
def ran(execute: Callable[[], int]) -> Iterator[Future[int]]:
    """Executes a run in a thread, while the main thread harms it: Ray adds nodes only in the main thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(execute)


def until(running: Future[int], condition: Callable[[], Found]) -> Found:
    """Waits until it is so, as long as the run lasts; returns what it has found then."""
    deadline = time.monotonic() + PATIENCE_SEC
    while not (found := condition()):
        assert not running.done(), "the run has ended before"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def busy_node(cluster: SmallCluster) -> Any:
    """A node with a box in its host; `None` when there is none."""
    return next((node for node in cluster.nodes if any(_has_box(host) for host in cluster.hosts(node))), None)


def _has_box(host: psutil.Process) -> bool:
    try:
        return any(child.name() == "bwrap" for child in host.children(recursive=True))
    except psutil.NoSuchProcess:
        return False
