"""What an episode costs beside its steps: twenty questions, one step each, recorded as a run records them.

Run by hand: `python -m tests.benchmarks.bench_episodes [--dir PLACE]`. The whole experiment with the JSON collector and
the answer log, no container and no agent: what remains is making, recording, syncing and forgetting an episode. Prints
episodes per second and CPU per episode; `--dir` chooses the disk, whose syncs are a part of it. Two runs in a row on
ext4 are to be a few minutes apart, as the first removes its files.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import as_container_factory
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.twenty_questions.source import TwentyQuestionsEnvironments
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.records.run_dir import RunDir
from ares_exp.records.run_summary import RunSummary
from ares_exp.running.components import Components, Settings
from ares_exp.running.experiment import Experiment
from ares_exp.trackers.null_tracker import NullTracker
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.wrappers.drivers import drive_async_gym
from tests.benchmarks.bench_load import Boxes, play

ATTEMPTS = 10
CONCURRENCIES = (1, 8, 64)
ROUNDS = 3


_numbers = itertools.count()


def measure(concurrency: int, folder: Path, *, is_recorded: bool) -> tuple[float, float]:
    """Plays all games `ATTEMPTS` times; returns wall and CPU seconds of an episode."""
    run_dir = RunDir(folder / f"run-{next(_numbers)}")
    collectors: dict[str, TrajectoryCollector] = {}
    if is_recorded:
        collectors["json"] = JsonTrajectoryCollector(run_dir.trajectories)
    components = Components(
        source=TwentyQuestionsEnvironments(),
        agent_factory=ShellAgentFactory(),
        container_factory=as_container_factory(Boxes()),  # type: ignore[arg-type]
        policy=OraclePolicy(),
        wrapper=drive_async_gym,
        collectors=collectors,
        tracker=NullTracker(),
    )
    made = Experiment(
        components, Settings(ATTEMPTS, concurrency, 0, EpisodeLimits(), policy_timeout_sec=600.0), run_dir
    )
    began, cpu_began = time.perf_counter(), time.process_time()
    summary: RunSummary = asyncio.run(play(made, run_dir))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    if not summary.complete:
        raise RuntimeError(f"Expected every episode to have a reward, got {summary.count()}")
    return wall / summary.planned, cpu / summary.planned


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="where the runs are written; by default a temporary one")
    logging.disable(logging.INFO)
    # All runs are removed at the end: for a minute ext4 is slow to make files where others have been removed.
    with tempfile.TemporaryDirectory(dir=parser.parse_args(given).dir) as folder:
        print_table(Path(folder))


def print_table(folder: Path) -> None:
    measure(8, folder, is_recorded=True)  # what is imported once
    print(f"median of {ROUNDS} rounds of {ATTEMPTS} attempts at 60 games, Python {sys.version.split()[0]}\n")
    print("| at once | collector | episodes/s | CPU per episode |\n|---|---|---|---|")
    for concurrency in CONCURRENCIES:
        for is_recorded in (True, False):
            rounds = [measure(concurrency, folder, is_recorded=is_recorded) for _ in range(ROUNDS)]
            wall, cpu = (statistics.median(figures) for figures in zip(*rounds, strict=True))
            name = "json" if is_recorded else "none"
            print(f"| {concurrency} | {name} | {1 / wall:.0f} | {cpu * 1e3:.2f} ms |", flush=True)


if __name__ == "__main__":
    main()
