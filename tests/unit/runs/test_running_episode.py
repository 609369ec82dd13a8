"""Running episodes: one, many in a process, and the event loop between them."""

import asyncio
import gc
import json
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.environment import EnvironmentWrapper, EpisodeReport, TimeStep, restart, termination, truncation
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import AgentError
from ares_exp.llms.response import LLMResponse, TextData, Usage
from ares_exp.records.recorded_results import read_results
from ares_exp.records.results import Outcome, RunSummary
from ares_exp.records.run_dir import RunDir, dump_json
from ares_exp.rollout import run_episode
from ares_exp.runs import steady_loop
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import plan_episodes
from ares_exp.runs.steady_loop import SteadyEventLoop
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collectors import MemoryTrajectoryCollector
from ares_exp.trajectories.recorded_responses import Exchange
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.response_log import LoggedEpisode
from tests.benchmarks.bench_load import Tasks, Work, execute, experiment

PLANNED = plan_episodes(["a"], attempts=1, seed=0)[0]


def test_row_is_readable_after_any_failure(tmp_path: Path) -> None:
    episode, run_dir = RunningEpisode(planned=PLANNED), RunDir(tmp_path)
    run_dir.episodes.touch()
    run_dir.append_episodes(dump_json(episode.to_result(AgentError("x" * 5_000_000)).to_dict()))
    episode.last = TimeStep("LAST", math.nan, 0.0, None)
    run_dir.append_episodes(dump_json(episode.to_result(None).to_dict()))
    endless, no_number = read_results(run_dir.episodes).results
    assert endless.error is not None
    assert endless.error.message.endswith("… (5,000,000 characters)")
    assert (no_number.outcome, no_number.reward) == (Outcome.ERRORED, None)


def test_responses_in_a_snapshot_are_paid_once() -> None:
    response = LLMResponse(data=[TextData(content="hi")], cost=0.5, usage=Usage(prompt_tokens=10, generated_tokens=1))
    first = RunningEpisode(planned=PLANNED)
    first.usage.add(response)
    cut_short = first.to_result(AgentError("killed"))
    log = LoggedEpisode(PLANNED.episode_id, *PLANNED.slot, 0, 7, 0.0, exchanges=[Exchange({}, response)])
    episode = RunningEpisode(planned=PLANNED.going_on(log, retry=1))
    episode.from_snapshot = 1
    episode.usage.add(response)
    ended = episode.to_result(AgentError("no container"))
    assert RunSummary(planned=1, results=(cut_short, ended)).paid()["cost"] == 0.5


class Ends:
    """One step, then LAST with that reward and discount, or an exception."""

    def __init__(self, last: TimeStep[Any] | Exception, limit: str | None) -> None:
        self.last, self.limit = last, limit

    async def reset(self) -> TimeStep[Any]:
        return restart("?")

    async def step(self, action: Any) -> TimeStep[Any]:
        if isinstance(self.last, Exception):
            raise self.last
        return self.last

    async def close(self) -> None: ...

    def report(self) -> EpisodeReport:
        return EpisodeReport(truncated_by=self.limit)


@pytest.mark.parametrize(
    ("last", "limit", "expected"),
    [
        (termination(0.5), None, (Outcome.COMPLETED, None, None, 0.5)),
        (truncation(0.5), "tokens", (Outcome.TRUNCATED, "limit reached: tokens", "tokens", 0.5)),
        (truncation(None), None, (Outcome.TRUNCATED, "limit reached: unknown", "unknown", None)),
        (termination(math.inf), None, (Outcome.ERRORED, "the environment's reward is inf", None, None)),
        (truncation(math.nan), "steps", (Outcome.ERRORED, "the environment's reward is nan", None, None)),
        (AgentError("no"), None, (Outcome.AGENT_ERROR, "no", None, None)),
    ],
)
async def test_row_and_trajectory_agree_on_the_outcome(
    last: Any, limit: str | None, expected: tuple[object, ...]
) -> None:
    async def policy(request: Any) -> LLMResponse:
        return LLMResponse.from_text("a")

    episode = RunningEpisode(planned=PLANNED, environment=EnvironmentWrapper(Ends(last, limit)))
    assert episode.environment is not None
    collecting = TrajectoryCollectingEnvironment(episode.environment, MemoryTrajectoryCollector(), listener=episode)
    failure = None
    try:
        await run_episode(collecting, policy, episode)
    except AgentError as error:
        failure = error
    row, trajectory = episode.to_result(failure), episode.trajectory
    assert trajectory is not None
    assert trajectory is collecting.trajectory
    assert (row.outcome, row.error and row.error.message, row.limit, row.reward) == expected
    assert (trajectory.outcome, trajectory.error, trajectory.limit) == (row.outcome, row.error, row.limit)
    assert (trajectory.total_reward, trajectory.truncated) == (row.reward, row.outcome is Outcome.TRUNCATED)
    assert EpisodeTrajectory.from_dict(json.loads(json.dumps(trajectory.to_dict(), allow_nan=False))) == trajectory


def test_result_includes_payment_after_last_step() -> None:
    episode = RunningEpisode(planned=PLANNED)
    episode.reached_last(termination(1.0), EpisodeReport(), end_time=episode.started_at + 5.0)
    assert episode.to_result(None).finished_at == episode.started_at + 5.0
    episode.usage.pay(LLMResponse.from_text("too late", usage=Usage(3, 2)))
    assert episode.to_result(None).prompt_tokens == 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(monotonic=100.0, cpu=1.0)
    fake = SimpleNamespace(monotonic=lambda: now.monotonic, process_time=lambda: now.cpu)
    monkeypatch.setattr(steady_loop, "time", fake)
    return now


@pytest.fixture
def loop(clock: SimpleNamespace) -> Iterator[SteadyEventLoop]:
    loop = SteadyEventLoop()
    yield loop
    loop.close()


@pytest.mark.parametrize(
    ("passed", "cpu", "counted"),
    [(60.0, 0.1, 0.0), (60.0, 59.0, 60.0), (2.0, 0.0, 2.0)],
    ids=["stopped", "busy", "short"],
)
def test_clock_stands_still_while_stopped(
    clock: SimpleNamespace, loop: SteadyEventLoop, passed: float, cpu: float, counted: float
) -> None:
    before = loop.time()
    clock.monotonic += passed
    clock.cpu += cpu
    assert loop.time() - before == pytest.approx(counted)
    clock.monotonic += 1.0
    assert loop.time() - before == pytest.approx(counted + 1.0)


def test_time_limit_does_not_pass_while_stopped(clock: SimpleNamespace, loop: SteadyEventLoop) -> None:
    async def stopped_meanwhile() -> str:
        async with asyncio.timeout(30):
            answer = loop.create_future()
            clock.monotonic += 60.0
            loop.call_soon(answer.set_result, "in time")
            return await answer

    assert loop.run_until_complete(stopped_meanwhile()) == "in time"


EPISODES, AT_ONCE = 200, 100
THREADS = 32
"""As many as an event loop has at most. Each lets go of its last work a moment after who waited for that goes on."""


class Counted:
    """Counts objects that are there.

    Attributes:
        alive: The objects.
        most: The most that there were at a time.
    """

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def add(self, made: Any) -> Any:
        self.alive.add(made)
        self.most = max(self.most, len(self.alive))
        return made


class CountedTasks(Tasks):
    """Counts environments, and what their agents hold: the container is the last thing that they let go of."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.environments, self.containers = Counted(), Counted()

    def make(self, task_name: str, parts: EpisodeParts) -> CodeEnvironment:
        def counted(spec: ContainerSpec) -> Any:
            return self.containers.add(parts.container_factory(spec))

        environment = super().make(task_name, replace(parts, container_factory=counted))  # type: ignore[arg-type]
        self.environments.add(environment)
        return environment


@pytest.fixture
def without_garbage_collector() -> Iterator[None]:
    """Inside, only what nothing refers to is freed."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_garbage_collector")
async def test_hundreds_at_once_all_finish_and_are_freed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    tasks, policy = CountedTasks(EPISODES), Work(0.05, steps=(2, 6))
    summary = await execute(experiment(tasks, policy, AT_ONCE, run_dir), run_dir)
    assert summary.complete
    rows = [json.loads(line) for line in run_dir.episodes.read_text().splitlines()]
    assert {row["task_name"] for row in rows} == {f"task-{number}" for number in range(EPISODES)}
    assert len(rows) == EPISODES
    assert sum(row["num_steps"] for row in rows) == policy.steps
    assert list(run_dir.responses.iterdir()) == []
    kept = [EpisodeTrajectory.load(run_dir.trajectories / f"{row['episode_id']}.json") for row in rows]
    assert [len(one.steps) - 1 for one in kept] == [row["num_steps"] for row in rows]
    for counted in (tasks.environments, tasks.containers):
        assert len(counted.alive) == 0
        assert counted.most <= AT_ONCE + THREADS
