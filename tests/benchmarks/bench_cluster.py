"""Runs on a cluster of three nodes on this machine: how they scale by slots, and what a host costs the run.

Run by hand: `python -m tests.benchmarks.bench_cluster [--latency 1] [--episodes 300] [--steps 10]`. Episodes are in
memory, as in `bench_load`: the policy takes the time, so that one machine can stand for several.

Rows `slots`: 60 episodes on hosts of 10 slots each, which fill one, two and three of them. Ideal is 1 : 1/2 : 1/3 of
the time. Rows `at once`: that many episodes at once on three hosts. The start of a host counts for
more if episodes are short: a code agent takes some 30 steps (`--steps 30`). The clock runs from when all hosts are
ready. Each row shows the load average, which includes other programs.
"""

import argparse
import asyncio
import logging
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from ares_exp.records.run_dir import RunDir
from ares_exp.runs.executors.executor import Executor, Recipe
from ares_exp.runs.executors.ray_executor import RayExecutor
from ares_exp.trackers.tracker import RunInfo
from tests.benchmarks.bench_load import Tasks, Work, experiment
from tests.ray.cluster import SmallCluster
from tests.ray.runs import PATIENCE_SEC

NODES = 3
HERE = "tests.benchmarks.bench_load"


def recipe(count: int) -> Recipe:
    """What hosts make the same in-memory episodes from."""
    nodes = {
        "env": {"_target_": f"{HERE}.Tasks", "count": count},
        "agent": {"_target_": "ares_exp.agents.shell_agent.ShellAgentFactory"},
        "container": {"_target_": f"{HERE}.Boxes"},
    }
    return Recipe(nodes, Path.cwd(), tuple(str(Path(entry or ".").absolute()) for entry in sys.path))


async def measure(executor: Executor, episodes: int, concurrency: int, policy: Work, hosts: int) -> float:
    """Runs episodes, as soon as there are so many hosts; returns the seconds from then on."""
    with tempfile.TemporaryDirectory(prefix="ares_exp-cluster-") as folder:
        run_dir = RunDir(Path(folder) / "run")
        parts = {"executor": executor, "recipe": recipe(episodes)}
        made = experiment(Tasks(episodes), policy, concurrency, run_dir, **parts)
        with run_dir.owned():
            names = await made.prepare()
            while executor.figures().get("system/hosts", 0) < hosts:  # noqa: ASYNC110 -- only looked at here
                await asyncio.sleep(0.1)
            started = time.perf_counter()
            summary = await made.run(names, RunInfo(run_dir=run_dir.path, name="cluster", run_id="cluster"))
            wall_sec = time.perf_counter() - started
            await made.close(summary)
        assert all(one.reward is not None for one in summary.results), summary
    return wall_sec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--steps", type=int, default=10, help="of an episode")
    given = parser.parse_args()
    logging.disable(logging.INFO)
    cluster = SmallCluster(NODES)

    def ran(row: str, nodes: int, slots: int, episodes: int) -> None:
        taken = {f"upto{nodes}": 1.0}
        executor = RayExecutor(
            address=cluster.address, resources=taken, episodes_per_host=slots, join_timeout_sec=PATIENCE_SEC
        )
        concurrency = min(episodes, slots * nodes)
        policy = Work(given.latency, steps=(given.steps, given.steps))
        wall_sec = asyncio.run(measure(executor, episodes, concurrency, policy, nodes))
        ideal = episodes / concurrency * given.steps * given.latency
        rate = f"{ideal / wall_sec:.1%} of ideal; {policy.steps / wall_sec:.0f} steps/s"
        print(f"{row}, {nodes} hosts: {wall_sec:.1f} s, {rate} (load {os.getloadavg()[0]:.1f})", flush=True)

    try:
        for nodes in range(1, NODES + 1):
            ran("slots", nodes, 10, 10 * math.lcm(*range(1, NODES + 1)))
        ran("at once", NODES, math.ceil(given.episodes / NODES), given.episodes)
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
