"""What an episode costs beside its steps: twenty questions, one step each, recorded as a run records them.

Run by hand: `python -m tests.benchmarks.bench_episodes [--dir PLACE]`. The whole experiment with a collector and the
response log, no container and no agent: what remains is making, recording, syncing and forgetting an episode. Prints
episodes per second and CPU per episode; `--dir` chooses the disk, whose syncs are a part of it. Two runs in a row on
ext4 are to be a few minutes apart, as the first removes its files.
"""

import argparse
import asyncio
import itertools
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import as_container_factory
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.twenty_questions import TwentyQuestionsEnvironments
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.records.results import RunSummary
from ares_exp.records.run_dir import RunDir
from ares_exp.runs.components import Components, Settings
from ares_exp.runs.experiment import Experiment
from ares_exp.trackers.tracker import NullTracker
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.collectors import JsonlTrajectoryCollector, JsonTrajectoryCollector
from ares_exp.wrappers.async_gym import drive_async_gym
from tests.benchmarks.bench_load import Boxes, execute

ATTEMPTS = 10
CONCURRENCIES = (1, 8, 64)
COLLECTORS = ("json", "jsonl", "none")
ROUNDS = 3
_numbers = itertools.count()


def collectors_of(kind: str, run_dir: RunDir) -> dict[str, TrajectoryCollector]:
    if kind == "json":
        return {kind: JsonTrajectoryCollector(run_dir.trajectories)}
    return {kind: JsonlTrajectoryCollector(run_dir.path / "trajectories.jsonl")} if kind == "jsonl" else {}


def measure(concurrency: int, folder: Path, kind: str) -> tuple[float, float]:
    """Runs all games `ATTEMPTS` times; returns wall and CPU seconds of an episode."""
    run_dir = RunDir(folder / f"run-{next(_numbers)}")
    components = Components(
        source=TwentyQuestionsEnvironments(),
        agent_factory=ShellAgentFactory(),
        container_factory=as_container_factory(Boxes()),  # type: ignore[arg-type]
        policy=OraclePolicy(),
        wrapper=drive_async_gym,
        collectors=collectors_of(kind, run_dir),
        tracker=NullTracker(),
    )
    made = Experiment(
        components, Settings(ATTEMPTS, concurrency, 0, EpisodeLimits(), policy_timeout_sec=600.0), run_dir
    )
    started, cpu_started = time.perf_counter(), time.process_time()
    summary: RunSummary = asyncio.run(execute(made, run_dir))
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    if not summary.complete:
        raise RuntimeError(f"Expected every episode to have a reward, got {summary.count()}")
    return wall / summary.planned, cpu / summary.planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="where the runs are written; by default a temporary one")
    logging.disable(logging.INFO)
    # All runs are removed at the end: for a minute ext4 is slow to make files where others have been removed.
    with tempfile.TemporaryDirectory(dir=parser.parse_args().dir) as folder:
        measure(8, Path(folder), COLLECTORS[0])  # what is imported once
        print(f"median of {ROUNDS} rounds of {ATTEMPTS} attempts at 60 games, Python {sys.version.split()[0]}\n")
        print("| at once | collector | episodes/s | CPU per episode |\n|---|---|---|---|")
        for concurrency in CONCURRENCIES:
            for kind in COLLECTORS:
                rounds = [measure(concurrency, Path(folder), kind) for _ in range(ROUNDS)]
                wall, cpu = (statistics.median(figures) for figures in zip(*rounds, strict=True))
                print(f"| {concurrency} | {kind} | {1 / wall:.0f} | {cpu * 1e3:.2f} ms |", flush=True)


if __name__ == "__main__":
    main()
