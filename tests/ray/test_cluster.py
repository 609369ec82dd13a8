"""Runs on a cluster: the same results as without, whatever dies. More is in `tests/soak/cluster_runs.py`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.killed_run import KilledRun, Moment, check
from tests.leaks import wait_until
from tests.ray.cluster import SmallCluster
from tests.ray.runs import PATIENCE_SEC, busy_host, made, on, played, until
from tests.unit.containers.local_containers import needs_local

pytestmark = [needs_local, pytest.mark.local]


def test_it_is_the_same_run_with_files_that_are_sent(whole: KilledRun, cluster: SmallCluster, tmp_path: Path) -> None:
    with made(tmp_path, *on(cluster, "executor.storage=stream")) as run:
        assert run.begin() == 0, run.said
        check(run, whole)
    assert [row["retry"] for row in run.all_rows] == [0] * len(whole.all_rows)
    files = {one.relative_to(run.path / "files").parts[1:] for one in (run.path / "files").rglob("*")}
    assert files == {one.relative_to(whole.path / "files").parts[1:] for one in (whole.path / "files").rglob("*")}


def test_the_killed_driver_goes_on(whole: KilledRun, cluster: SmallCluster, tmp_path: Path) -> None:
    with made(tmp_path, *on(cluster)) as run:
        assert run.begin(Moment(requests=6)) == -signal.SIGKILL
        assert wait_until(lambda: not cluster.hosts(), PATIENCE_SEC), "its hosts have ended"
        assert run.resume() == 0, run.said
        check(run, whole)


def test_hosts_and_nodes_die_and_another_joins(whole: KilledRun, cluster: SmallCluster, tmp_path: Path) -> None:
    """A host is killed, then all nodes lose their power: the run waits, and goes on with one that comes."""
    with made(tmp_path, *on(cluster), latency_sec=0.3) as run:
        log = run.path / "run.log"
        with played(run) as playing:
            until(playing, lambda: run.endpoint.asked.total() >= 4 and (host := busy_host(cluster)) and not host.kill())
            until(playing, lambda: "is lost" in log.read_text())
            asked = run.endpoint.asked.total()
            until(playing, lambda: run.endpoint.asked.total() >= asked + 3 and busy_host(cluster))
            for node in list(cluster.nodes):
                cluster.cut_power(node)
            until(playing, lambda: "the run waits for a node" in log.read_text())
            cluster.add()
            assert playing.result(PATIENCE_SEC) == 0, run.said
        run.kills = 2
        check(run, whole)
    lost = [row for row in run.all_rows if row["outcome"] == "lost"]
    assert len(lost) >= 2, "one was on the host, and one on a node"
    assert {row["error"]["type"] for row in lost} == {"HostLostError"}
