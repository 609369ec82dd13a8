# ruff: noqa: F811 -- fixtures are imported
"""More runs on a cluster than `tests/ray` has time for: bundled tasks, a raylet that dies, a host that is cut off.

`pytest -n 0 -m '' tests/soak/cluster_runs.py`
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ares_exp.trajectories import load
from tests.e2e.killed_run import KilledRun, Moment, check, containers_of, content
from tests.leaks import wait_until
from tests.loopback_endpoint import LoopbackEndpoint, respond
from tests.ray.cluster import SmallCluster
from tests.ray.conftest import cluster, cluster_and_whole, whole  # noqa: F401
from tests.ray.runs import LEASE_SEC, PATIENCE_SEC, made, on, ran, until
from tests.unit.containers.local_containers import needs_local

pytestmark = [needs_local, pytest.mark.local]


@pytest.fixture(autouse=True)
def several_nodes(cluster: SmallCluster) -> None:
    while len(cluster.nodes) < 3:
        cluster.add()


@pytest.fixture
def run(tmp_path: Path, cluster: SmallCluster) -> Iterator[KilledRun]:
    with made(tmp_path, *on(cluster)) as run:
        yield run


def test_shared_disk_files_give_the_same_run(run: KilledRun, whole: KilledRun) -> None:
    run.overrides = (*run.overrides, "executor.storage=shared")
    assert run.start() == 0, run.said
    check(run, whole)


def test_bundled_tasks_give_the_same_results(cluster: SmallCluster, tmp_path: Path) -> None:
    """By their own solutions, no difference in any episode."""
    found = {}
    for name, more in (("here", ()), ("there", on(cluster))):
        command = [sys.executable, "-m", "ares_exp", "tracker=none", "concurrency=6", f"hydra.run.dir={name}", *more]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
        assert ran.returncode == 0, ran.stderr
        found[name] = {
            (one.task_name, one.metadata["attempt"]): content(one) for one in load(tmp_path / name).trajectories()
        }
    assert len(found["here"]) >= 6
    assert found["here"] == found["there"]


Harm = Callable[[SmallCluster], Callable[[], object]]


def kill_raylet(cluster: SmallCluster) -> Callable[[], object]:
    cluster.kill_raylet(cluster.nodes[0])
    return lambda: None


def stop_host(cluster: SmallCluster) -> Callable[[], object]:
    """The host is cut off: it does nothing for twice its lease, then continues."""
    [host, *_] = cluster.hosts(cluster.nodes[0])
    host.suspend()
    timer = threading.Timer(2 * LEASE_SEC, lambda: _resume(host))
    timer.start()
    return timer.join


def _resume(host: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        host.resume()


@pytest.mark.parametrize("harm", [kill_raylet, stop_host])
def test_lost_host_costs_no_response(run: KilledRun, whole: KilledRun, cluster: SmallCluster, harm: Harm) -> None:
    """One episode is on a node that is harmed in the middle: it resumes elsewhere with the same result."""
    run.overrides = (*run.overrides, "executor.episodes_per_host=1")
    with ran(run.start) as running:
        until(running, lambda: run.endpoint.asked.total() >= 8 and len(cluster.hosts()) == len(cluster.nodes))
        mend = harm(cluster)
        try:
            assert running.result() == 0, run.said
        finally:
            mend()
    run.kills = 1
    lost = [row for row in run.all_rows if row["outcome"] == "lost"]
    assert len(lost) == 1, "one episode was on the node"
    assert lost[0]["error"]["type"] == "HostLostError"
    check(run, whole)
    assert "is lost" in (run.path / "run.log").read_text()


def test_killed_driver_resumes_without_the_cluster(run: KilledRun, whole: KilledRun, cluster: SmallCluster) -> None:
    assert run.start(Moment(requests=6)) == -signal.SIGKILL
    assert run.resume(Moment(requests=4), "executor=local") == -signal.SIGKILL
    assert run.resume(Moment(), *on(cluster)) == 0, run.said
    check(run, whole)


@contextlib.contextmanager
def containers_of_hosts_counted(run: KilledRun, cluster: SmallCluster) -> Iterator[None]:
    """Adds the hosts that there are meanwhile to the run's processes, whose containers are looked for at its end."""
    has_ended = threading.Event()

    def look() -> None:
        while not has_ended.wait(0.2):
            run.pids += {host.pid for host in cluster.hosts()} - {*run.pids}

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@pytest.mark.docker
def test_engine_containers_end_with_their_owners(cluster: SmallCluster, tmp_path: Path) -> None:
    """The engine that all nodes share has no leftovers after a run, after its kill and after a host's kill."""
    with made(tmp_path / "whole") as whole:
        whole.backend = "docker"
        assert whole.start() == 0, whole.said
        with made(tmp_path / "there", *on(cluster), latency_sec=0.3) as run, containers_of_hosts_counted(run, cluster):
            run.backend = "docker"
            assert run.start(Moment(requests=8)) == -signal.SIGKILL
            assert len(run.pids) > 1, "hosts have been seen"
            assert wait_until(lambda: not run.left(), PATIENCE_SEC), run.left()
            with ran(run.resume) as running:
                asked = run.endpoint.asked.total()
                until(running, lambda: run.endpoint.asked.total() >= asked + 3 and len(run.left()) > 2)
                busy = max(cluster.hosts(), key=lambda host: len(containers_of(host.pid)))
                held = containers_of(busy.pid)
                assert held
                busy.kill()
                started = time.monotonic()
                assert wait_until(lambda: not containers_of(busy.pid), PATIENCE_SEC)
                print(
                    f"{len(held)} containers had ended {time.monotonic() - started:.1f} s after the kill of their host"
                )
                assert running.result() == 0, run.said
            run.kills = 2
            check(run, whole)
    assert sum(row["outcome"] == "lost" for row in run.all_rows) > 0


POISON = """
import os, signal

def poison(episode, container):
    if episode.task.name.endswith("task-0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


def test_task_that_kills_hosts_is_identified(run: KilledRun, cluster: SmallCluster, tmp_path: Path) -> None:
    (tmp_path / "poison.py").write_text(POISON)
    scored = ("env.scorers=[poison.poison]", "attempts=1", "concurrency=3")
    run.overrides = (*run.overrides, *scored, "executor.lost_per_attempt=2", "executor.episodes_per_host=8")
    assert run.start() == 1, run.said
    final = {row["task_name"]: row for row in run.all_rows}
    assert {name: row["outcome"] for name, row in final.items()} == {
        "task-0": "container_error",
        "task-1": "completed",
        "task-2": "completed",
    }
    assert final["task-0"]["error"]["type"] == "HostsLostError"


CANARY = "canary-9b1f5c"


def test_driver_calls_the_judge_and_keeps_keys(cluster: SmallCluster, tmp_path: Path) -> None:
    """The hosts have no key; what the judge said is on record in the run directory."""
    seen: list[str] = []

    def look() -> None:
        for host in cluster.hosts():
            with contextlib.suppress(psutil.Error):
                seen.append(" ".join([*host.cmdline(), *host.environ().values()]))

    with LoopbackEndpoint(otherwise=respond("Score: 7")) as judge:
        command = (
            *(sys.executable, "-m", "ares_exp", "env.tasks=write-greeting", "tracker=none", "hydra.run.dir=run"),
            *("scorer=judge", "scorer.policy.model=m", f"scorer.policy.base_url={judge.url}"),
            *("scorer.policy.api_key_env=JUDGE_API_KEY", "executor.storage=stream"),
            *on(cluster),
        )
        environment = {**os.environ, "JUDGE_API_KEY": CANARY}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        while process.poll() is None:
            look()
            time.sleep(0.2)
        said, _ = process.communicate()
        assert process.returncode == 0, said
        assert judge.requests
        assert all(CANARY in one.headers["authorization"] for one in judge.requests)
    [row] = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    assert row["rewards"]["judge"] == pytest.approx(0.7)
    assert row["environment_usage"] is not None
    assert (tmp_path / "run" / "files" / row["episode_id"] / "oracle.jsonl").is_file()
    assert seen
    assert CANARY not in "".join(seen)


def test_run_without_suitable_nodes_is_rejected(cluster: SmallCluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ares_exp", "tracker=none", "hydra.run.dir=run"]
    refused = subprocess.run(
        [*command, *on(cluster, "executor.storage=stream", "snapshot=every_step")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SEC,
        check=False,
    )
    assert refused.returncode == 2
    assert "does not share the run directory" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "run").exists()
