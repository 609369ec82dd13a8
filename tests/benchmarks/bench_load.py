"""How many episodes one process holds: the whole experiment, with a policy that takes a second for each response.

Run by hand: `python -m tests.benchmarks.bench_load` (some ten minutes; `--latency 0.05 --rounds 2` for a look). Each
row is a process of its own: the real experiment with the shell agent, the JSON collector and the async wrapper, on
containers in memory; episodes of 10 to 30 steps, with responses and outputs of 2 KB.

Ideal is a machine on which nothing but the policy takes time: `concurrency / latency` steps per second, from the
start of the run, the first containers and requests included, until the last episode is started; after that there are
not enough of them left.
"""

import argparse
import asyncio
import logging
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import ContainerSpec, ExecResult, as_container_factory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EpisodeParts, as_source
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.records.results import RunSummary
from ares_exp.records.run_dir import RunDir
from ares_exp.runs.components import Components, Settings
from ares_exp.runs.experiment import Experiment
from ares_exp.trackers.tracker import NullTracker, RunInfo
from ares_exp.trajectories.collectors import JsonTrajectoryCollector
from ares_exp.wrappers.async_gym import drive_async_gym
from tests.benchmarks.bench_step import InMemoryContainer, InMemoryTask

CONCURRENCIES = (1, 10, 100, 1000)
STEPS = (10, 30)
MESSAGE_CHARS = 2048


class Work(Policy):
    """Commands with 2 KB of thoughts, `latency` seconds each, as many as the episode's seed says; then the submit line.

    Attributes:
        started: Episodes that were started.
        steps: Responses that were given.
    """

    def __init__(
        self, latency: float, *, steps: tuple[int, int] = STEPS, on_start: Callable[[], None] = lambda: None
    ) -> None:
        self.started = self.steps = 0
        self._latency, self._range, self._on_start = latency, steps, on_start

    def for_episode(self, episode: EpisodeSpec) -> Any:
        self.started += 1
        self._on_start()
        count = random.Random(episode.seed).randint(*self._range)
        given = 0

        async def respond(request: object) -> LLMResponse:
            nonlocal given
            await asyncio.sleep(self._latency)
            given += 1
            self.steps += 1
            thoughts = f"{episode.seed} {given} ".ljust(MESSAGE_CHARS, "t")
            command = "echo done" if given == count else f"cat file{given}"
            return LLMResponse.from_text(
                f"{thoughts}\n\n```bash\n{command}\n```\n", usage=Usage(500 * given, 500), latency_sec=self._latency
            )

        return respond


class Box(InMemoryContainer):
    async def exec(self, command: str, **options: object) -> ExecResult:
        result = await super().exec(command, **options)
        return result if "echo" in command else ExecResult(f"{command} ".ljust(MESSAGE_CHARS, "o"), 0, 0.0)


class Boxes:
    name = "memory"

    def __call__(self, spec: ContainerSpec) -> Any:
        return Box()

    async def preflight(self) -> None: ...

    def check(self, spec: ContainerSpec) -> list[str]:
        return []


class Tasks:
    path = None

    def __init__(self, count: int) -> None:
        self._tasks = {f"task-{number}": InMemoryTask() for number in range(count)}
        for name, task in self._tasks.items():
            task.name = name

    def load(self, report: object) -> Sequence[str]:
        return list(self._tasks)

    def check(self, parts: EpisodeParts, *, report: object) -> None: ...

    def make(self, task_name: str, parts: EpisodeParts) -> CodeEnvironment:
        return CodeEnvironment.for_episode(self._tasks[task_name], parts)  # type: ignore[arg-type]


def experiment(tasks: Tasks, policy: Work, concurrency: int, run_dir: RunDir, **more: Any) -> Experiment:
    """The experiment as the command line makes it, but for the containers, the tracker and more components."""
    components = Components(
        source=as_source(tasks),
        agent_factory=ShellAgentFactory(),
        container_factory=as_container_factory(Boxes()),  # type: ignore[arg-type]
        policy=policy,
        wrapper=drive_async_gym,
        collectors={"json": JsonTrajectoryCollector(run_dir.trajectories)},
        tracker=NullTracker(),
        **more,
    )
    settings = Settings(1, concurrency, 0, EpisodeLimits(), policy_timeout_sec=600.0)
    return Experiment(components, settings, run_dir)


async def execute(made: Experiment, run_dir: RunDir) -> RunSummary:
    with run_dir.owned():
        names = await made.prepare()
        summary = await made.run(names, RunInfo(run_dir=run_dir.path, name="load", run_id="load"))
        await made.close(summary)
    return summary


@dataclass(slots=True)
class Measured:
    """What one row is made of: seconds, bytes; `full_*` until the last episode was started."""

    concurrency: int
    latency: float
    episodes: int
    steps: int = 0
    cpu_sec: float = 0.0
    full_sec: float = 0.0
    full_steps: int = 0
    lag_sec: float = 0.0
    rss_before: int = 0
    rss_peak: int = 0
    rss: dict[int, int] = field(default_factory=dict)

    def row(self) -> str:
        rate = self.full_steps / self.full_sec
        ideal = self.concurrency / self.latency
        grown = self.rss_peak - self.rss_before
        return (
            f"| {self.concurrency:,} | {rate / (self.steps / self.episodes):.3g} | {rate:.4g} "
            f"| {rate / ideal:.1%} | {self.cpu_sec / self.steps * 1e6:.0f} us | {self.rss_peak / 1e6:.0f} MB "
            f"| {grown / self.concurrency / 1e3:.0f} kB | {self.lag_sec * 1e3:.0f} ms |"
        )


HEADER = (
    "| episodes at once | episodes/s | steps/s | of the ideal | CPU per step | peak RSS | RSS per episode at once "
    "| longest loop lag |\n|---|---|---|---|---|---|---|---|"
)


def measure(concurrency: int, latency: float, rounds: int) -> Measured:
    """Runs `rounds + 1` times as many episodes as there are at once, and says what that took."""
    logging.disable(logging.INFO)
    measured = Measured(concurrency, latency, episodes=concurrency * (rounds + 1))

    def on_start() -> None:
        finished = policy.started - concurrency
        if finished in (concurrency, rounds * concurrency):
            measured.rss[finished] = _rss()
        if policy.started == measured.episodes:
            measured.full_sec, measured.full_steps = time.perf_counter() - started, policy.steps

    policy = Work(latency, on_start=on_start)
    with tempfile.TemporaryDirectory(prefix="ares_exp-load-") as folder:
        _execute_all(Work(0.0), 1, 1, RunDir(Path(folder) / "first"))  # what is imported and compiled once
        measured.rss_before = _rss()
        started, cpu_started = time.perf_counter(), time.process_time()
        summary = _execute_all(policy, measured.episodes, concurrency, RunDir(Path(folder) / "run"))
        measured.cpu_sec = time.process_time() - cpu_started
    measured.steps, measured.lag_sec = policy.steps, summary.max_loop_lag_sec
    measured.rss_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return measured


def _execute_all(policy: Work, episodes: int, concurrency: int, run_dir: RunDir) -> RunSummary:
    summary = asyncio.run(execute(experiment(Tasks(episodes), policy, concurrency, run_dir), run_dir))
    written = len(list(run_dir.trajectories.glob("*.json")))
    if not summary.complete or written != episodes:
        raise RuntimeError(f"Expected {episodes} episodes with a file each, got {written}: {summary.count()}")
    return summary


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--latency", type=float, default=1.0, help="seconds for a response")
    parser.add_argument("--rounds", type=int, default=5, help="finished episodes for each one in progress")
    given = parser.parse_args()
    print(f"Responses of {given.latency:g} s, {STEPS[0]} to {STEPS[1]} steps, Python {sys.version.split()[0]}\n")
    print(HEADER)
    memory = []
    for concurrency in given.concurrency:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            measured = fresh.submit(measure, concurrency, given.latency, given.rounds).result()
        print(measured.row(), flush=True)
        shown = ", ".join(f"{rss / 1e6:.0f} MB with {finished:,} finished" for finished, rss in measured.rss.items())
        memory.append(f"{concurrency:,} at once: RSS {shown}.")
    print("\n" + "\n".join(memory))


if __name__ == "__main__":
    main()
