"""Runs on a cluster of three nodes on this machine: how they scale by slots, and what a host costs the run.

Run by hand: `python -m tests.benchmarks.bench_cluster [--latency 1] [--episodes 300] [--steps 10]`. Episodes are in
memory, as in `bench_load`: the policy takes the time, so that one machine can stand for several.

Rows `slots`: hosts of 10 slots each, `--waves` times 60 episodes, which fill one, two and three of them; ideal is
1 : 1/2 : 1/3 of the time. Row `at once`: so many episodes at once on three hosts, beside the same ones `here`; ideal is
`episodes / latency` steps per second. What their start takes counts for more the shorter episodes are; a code agent
takes some 30 steps (`--steps 30`). Rows `here` and `ray` without latency: for the processor time of the run, and of all
hosts, per step and per episode. The clock runs from when all hosts are ready. Each row says the load average, of other
programs, too.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import as_container_factory
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import as_source
from ares_exp.records.run_dir import RunDir
from ares_exp.runs.components import Components, Settings
from ares_exp.runs.executors.executor import ExecutorBase, LocalExecutor, Recipe
from ares_exp.runs.executors.ray_executor import RayExecutor
from ares_exp.runs.experiment import Experiment
from ares_exp.trackers.tracker import NullTracker
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.wrappers.async_gym import drive_async_gym
from tests.benchmarks.bench_load import Boxes, Tasks, Work, execute
from tests.ray.cluster import SmallCluster
from tests.ray.runs import PATIENCE_SEC

NODES = 3
On = Callable[[int, int], RayExecutor]
"""Makes an executor on so many nodes, with so many slots on each."""
Processes = Callable[[], list[psutil.Process]]
"""Finds the processes of the hosts."""
HERE = "tests.benchmarks.bench_load"


def recipe(count: int) -> Recipe:
    """What hosts make the same in-memory episodes from."""
    nodes = {
        "env": {"_target_": f"{HERE}.Tasks", "count": count},
        "agent": {"_target_": "ares_exp.agents.shell_agent.ShellAgentFactory"},
        "container": {"_target_": f"{HERE}.Boxes"},
    }
    return Recipe(nodes, Path.cwd(), tuple(str(Path(entry or ".").absolute()) for entry in sys.path))


class Measured(NamedTuple):
    """What a run took.

    Attributes:
        wall_sec: From when all hosts were ready.
        cpu_sec: Of this process's processor.
        hosts_cpu_sec: Of that of all hosts.
        steps: Responses that were given.
    """

    wall_sec: float
    cpu_sec: float
    hosts_cpu_sec: float
    steps: int


def measure(
    executor: ExecutorBase,
    *,
    episodes: int,
    concurrency: int,
    latency: float,
    steps: int,
    hosts: int = 0,
    processes: Processes = list,
) -> Measured:
    """Runs episodes, as soon as there are so many hosts."""
    policy = Work(latency, steps=(steps, steps))
    with tempfile.TemporaryDirectory(prefix="ares_exp-cluster-") as folder:
        run_dir = RunDir(Path(folder) / "run")
        run_dir.path.mkdir()
        components = Components(
            source=as_source(Tasks(episodes)),
            agent_factory=ShellAgentFactory(),
            container_factory=as_container_factory(Boxes()),  # type: ignore[arg-type]
            policy=policy,
            wrapper=drive_async_gym,
            collectors={"json": JsonTrajectoryCollector(run_dir.trajectories)},
            tracker=NullTracker(),
            executor=executor,
            recipe=recipe(episodes),
        )
        settings = Settings(1, concurrency, 0, EpisodeLimits(), policy_timeout_sec=600.0)
        made = _Timed(components, settings, run_dir, quiet=True)
        made.executor, made.hosts, made.processes = executor, hosts, processes
        summary = asyncio.run(execute(made, run_dir))
        assert summary.exit_code == 0 or all(one.reward is not None for one in summary.results), summary
    return Measured(made.wall_sec, made.cpu_sec, made.hosts_cpu_sec, policy.steps)


class _Timed(Experiment):
    """Measures the run, without its preparation."""

    wall_sec = cpu_sec = hosts_cpu_sec = 0.0
    executor: ExecutorBase
    hosts = 0
    processes: Processes

    async def run(self, *arguments: Any, **options: Any) -> Any:
        while self.executor.figures().get("system/hosts", 0) < self.hosts:  # noqa: ASYNC110 -- only looked at here
            await asyncio.sleep(0.1)
        found = self.processes()
        started, cpu, hosts_cpu = time.perf_counter(), time.process_time(), _cpu_sec(found)
        try:
            return await super().run(*arguments, **options)
        finally:
            self.wall_sec, self.cpu_sec = time.perf_counter() - started, time.process_time() - cpu
            self.hosts_cpu_sec = _cpu_sec(found) - hosts_cpu


def _cpu_sec(processes: list[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--steps", type=int, default=10, help="of an episode")
    parser.add_argument("--rows", nargs="+", default=["slots", "at-once", "overhead"], help="which to measure")
    parser.add_argument("--waves", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=1, help="how often the rows are measured, in turns")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    cluster = SmallCluster(NODES)

    def on(nodes: int, slots: int) -> RayExecutor:
        taken = {f"upto{nodes}": 1.0}
        return RayExecutor(
            address=cluster.address, resources=taken, episodes_per_host=slots, join_timeout_sec=PATIENCE_SEC
        )

    try:
        for _ in range(arguments.repeat):
            if "slots" in arguments.rows:
                _slots(on, arguments.waves, arguments.latency, arguments.steps)
            if "at-once" in arguments.rows:
                _at_once(on, arguments.episodes, arguments.latency, arguments.steps)
            if "overhead" in arguments.rows:
                _overhead(on, arguments.episodes, arguments.steps, cluster.hosts)
    finally:
        cluster.close()


def _slots(on: On, waves: int, latency: float, steps: int) -> None:
    first, episodes = 0.0, 10 * math.lcm(*range(1, NODES + 1)) * waves
    for nodes in range(1, NODES + 1):
        concurrency = 10 * nodes
        ran = measure(
            on(nodes, 10), episodes=episodes, concurrency=concurrency, latency=latency, steps=steps, hosts=nodes
        )
        first = first or ran.wall_sec
        of_first, ideal = ran.wall_sec / first, episodes / concurrency * steps * latency
        _say(f"slots: {nodes} hosts of 10: {ran.wall_sec:.1f} s (ideal {ideal:.0f}), {of_first:.3f} of the first")


def _at_once(on: On, count: int, latency: float, steps: int) -> None:
    ideal = steps * latency
    for name, executor, hosts in (("local", LocalExecutor(), 0), ("ray", on(NODES, math.ceil(count / NODES)), NODES)):
        ran = measure(executor, episodes=count, concurrency=count, latency=latency, steps=steps, hosts=hosts)
        rate = f"{ideal / ran.wall_sec:.1%} of ideal; {ran.steps / ran.wall_sec:.0f} steps/s"
        _say(f"at once, {name}: {count} episodes: {ran.wall_sec:.1f} s, {rate}")


def _overhead(on: On, count: int, steps: int, processes: Processes) -> None:
    """Of episodes with many steps and with one, so that what a step costs and what an episode costs can be told."""
    for name, hosts in (("here", 0), ("ray", NODES)):
        many, one = (
            measure(
                on(NODES, count) if hosts else LocalExecutor(),
                episodes=count,
                concurrency=min(count, 100),
                latency=0.0,
                hosts=hosts,
                steps=taken,
                processes=processes if hosts else list,
            )
            for taken in (steps, 1)
        )
        of_run = _costs(many, one, many.cpu_sec, one.cpu_sec)
        of_hosts = f", of hosts {_costs(many, one, many.hosts_cpu_sec, one.hosts_cpu_sec)}" if hosts else ""
        _say(f"{name}: {many.steps / many.wall_sec:.0f} steps/s; of processor {of_run}{of_hosts}")


def _costs(many: Measured, one: Measured, many_sec: float, one_sec: float) -> str:
    """Tells what a step and what an episode costs; `one` has as many steps as episodes."""
    per_step = (many_sec - one_sec) / (many.steps - one.steps)
    return f"{per_step * 1e6:.0f} us a step, {(one_sec / one.steps - per_step) * 1e3:.1f} ms an episode"


def _say(words: str) -> None:
    print(f"{words} (load {os.getloadavg()[0]:.1f})", flush=True)


if __name__ == "__main__":
    main()
