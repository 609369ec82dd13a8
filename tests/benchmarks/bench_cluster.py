"""Runs on a cluster of three nodes on this machine: how they scale by slots, and what a host costs the run.

Run by hand: `python -m tests.benchmarks.bench_cluster [--latency 1] [--episodes 300]`. Episodes are in memory, as in
`bench_load`: the policy takes the time, so that one machine can stand for several.

Rows `slots`: hosts of 10 slots each, `--waves` times as many episodes as three hosts have; ideal is 1 : 1/2 : 1/3 of
the time. Row `at once`: so many episodes at once on three hosts; ideal is `episodes / latency` steps per second. Rows
`here` and `ray`: latency 0, for the processor time of the run per step.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import as_container_factory
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import as_source
from ares_exp.executors.executor import ExecutorBase, Recipe
from ares_exp.executors.here import Here
from ares_exp.executors.ray_executor import RayExecutor
from ares_exp.records.run_dir import RunDir
from ares_exp.running.components import Components, Settings
from ares_exp.running.experiment import Experiment
from ares_exp.trackers.null_tracker import NullTracker
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.wrappers.drivers import drive_async_gym
from tests.benchmarks.bench_load import Boxes, Tasks, Work, play
from tests.ray.cluster import SmallCluster

STEPS = (10, 10)
HERE = "tests.benchmarks.bench_load"


def recipe(count: int) -> Recipe:
    """What hosts make the same in-memory episodes from."""
    nodes = {
        "env": {"_target_": f"{HERE}.Tasks", "count": count},
        "agent": {"_target_": "ares_exp.agents.shell_agent.ShellAgentFactory"},
        "container": {"_target_": f"{HERE}.Boxes"},
    }
    return Recipe(nodes, Path.cwd(), tuple(str(Path(entry or ".").absolute()) for entry in sys.path))


def measure(executor: ExecutorBase, *, episodes: int, concurrency: int, latency: float) -> tuple[float, float, int]:
    """Plays episodes; returns wall seconds and seconds of this process's processor, and the number of steps."""
    policy = Work(latency, steps=STEPS)
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
        summary = asyncio.run(play(made, run_dir))
        assert summary.exit_code == 0 or all(one.reward is not None for one in summary.results), summary
    return made.wall_sec, made.cpu_sec, policy.steps


class _Timed(Experiment):
    """Measures the run, without its preparation."""

    wall_sec = cpu_sec = 0.0

    async def run(self, *arguments: Any, **options: Any) -> Any:
        began, cpu = time.perf_counter(), time.process_time()
        try:
            return await super().run(*arguments, **options)
        finally:
            self.wall_sec, self.cpu_sec = time.perf_counter() - began, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--waves", type=int, default=2)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    cluster = SmallCluster(3)

    def on(nodes: int, slots: int) -> RayExecutor:
        return RayExecutor(address=cluster.address, resources={f"upto{nodes}": 1}, episodes_per_host=slots)

    try:
        latency, waves = arguments.latency, arguments.waves
        first = 0.0
        for nodes in (1, 2, 3):
            wall, _, _ = measure(on(nodes, 10), episodes=30 * waves, concurrency=10 * nodes, latency=latency)
            first = first or wall
            print(f"slots: {nodes} hosts of 10: {wall:.1f} s, {wall / first * nodes:.2f} of ideal", flush=True)
        count = arguments.episodes
        wall, cpu, steps = measure(on(3, count), episodes=count, concurrency=count, latency=latency)
        ideal = STEPS[0] * latency
        rate = f"{ideal / wall:.1%} of ideal; {steps / wall:.0f} steps/s"
        print(f"at once: {count} episodes: {wall:.1f} s, {rate}", flush=True)
        for name, executor in (("here", Here()), ("ray", on(3, count))):
            wall, cpu, steps = measure(executor, episodes=count, concurrency=min(count, 100), latency=0.0)
            print(f"{name}: {steps / wall:.0f} steps/s, {cpu / steps * 1e6:.0f} us of processor per step", flush=True)
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
