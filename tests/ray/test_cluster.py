"""Runs on a cluster: the same results as without, whatever dies. More is in `tests/soak/cluster_runs.py`."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.killed_run import KilledRun, Moment, check
from tests.leaks import wait_until
from tests.ray.cluster import SmallCluster
from tests.ray.runs import PATIENCE_SEC, busy_node, made, on, ran, until
from tests.unit.containers.local_containers import needs_local

pytestmark = [needs_local, pytest.mark.local]


def test_streamed_files_give_the_same_run(whole: KilledRun, cluster: SmallCluster, tmp_path: Path) -> None:
    with made(tmp_path, *on(cluster, "executor.storage=stream")) as run:
        assert run.start() == 0, run.said
        check(run, whole)
    assert [row["retry"] for row in run.all_rows] == [0] * len(whole.all_rows)
    files = {one.relative_to(run.path / "files").parts[1:] for one in (run.path / "files").rglob("*")}
    assert files == {one.relative_to(whole.path / "files").parts[1:] for one in (whole.path / "files").rglob("*")}


def test_run_without_address_ends_with_its_cluster(
    whole: KilledRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with made(tmp_path, "executor=ray", f"executor.join_timeout_sec={PATIENCE_SEC:g}") as run:
        with ran(run.start) as running:
            until(running, lambda: run.endpoint.asked.total() >= 3)
            run.endpoint.answering.clear()
            [raylet] = [one for one in psutil.Process(run.pids[0]).children() if one.name() == "raylet"]
            raylet.kill()
            assert running.result() == 2, run.said
            run.endpoint.answering.set()
        assert f"Use `ares-exp resume={run.path.name}` to continue the run." in run.said
        run.kills = 1
        assert run.resume() == 0, run.said
        check(run, whole)


def test_run_survives_killed_hosts_and_nodes(whole: KilledRun, cluster: SmallCluster, tmp_path: Path) -> None:
    """The driver is killed and resumed, the only host is killed, a node joins, and one with episodes loses its power.

    The new node either had some of these episodes, or it runs the rest.
    """
    with made(tmp_path, *on(cluster), latency_sec=0.3) as run:
        assert run.start(Moment(requests=6)) == -signal.SIGKILL
        assert wait_until(lambda: not cluster.hosts(), PATIENCE_SEC), "its hosts have ended"
        with ran(run.resume) as running:
            asked = run.endpoint.asked.total()
            until(running, lambda: run.endpoint.asked.total() >= asked + 2 and busy_node(cluster))
            [host] = cluster.hosts()
            run.endpoint.answering.clear()
            host.kill()
            cluster.add()
            run.endpoint.answering.set()
            asked = run.endpoint.asked.total()
            node = until(running, lambda: run.endpoint.asked.total() >= asked + 3 and busy_node(cluster))
            cluster.cut_power(node)
            assert running.result() == 0, run.said
        run.kills = 3
        check(run, whole)
    errors = [row["error"]["type"] for row in run.all_rows if row["outcome"] == "lost"]
    assert errors.count("HostLostError") >= 2, "one was on the host, and one on the node"
