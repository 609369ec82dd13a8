"""A run that ends while a try waits for its time: the try is owed when the run is resumed."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from ares_exp.errors import PolicyError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_dir import RunDir
from ares_exp.runs.resume.episode_plan import episode_seed, plan_episodes
from ares_exp.runs.resume.session import load_previous_sessions
from ares_exp.runs.retries import RetryRules
from ares_exp.trajectories.answer_log import LoggedEpisode, logged_episodes
from ares_exp.trajectories.collectors.memory_collector import MemoryTrajectoryCollector
from ares_exp.trajectories.recorded_responses import Exchange
from ares_exp.trajectories.records import serialize_llm_request
from tests.leaks import wait_until
from tests.unit.runs.resume.logs import log_in
from tests.unit.runs.test_experiment import REQUEST, Answers, experiment, play, rows

EXCHANGE = Exchange(serialize_llm_request(REQUEST), LLMResponse.from_text("a"))


class Fails(Answers):
    """Fails so often, and then answers."""

    def __init__(self, times: int) -> None:
        self.left = times

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        if self.left:
            self.left -= 1
            raise PolicyError("down")
        return await super().__call__(request)


async def test_a_try_that_waits_is_owed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    retry = RetryRules(policy_error=1, base_sec=80_000, max_wait_sec=80_000)
    made = experiment(tmp_path, count=1, policy=Fails(1), retry=retry, run_dir=run_dir)
    playing = asyncio.create_task(play(made, tmp_path))
    waits = functools.partial(wait_until, lambda: [log.retry for log in logged_episodes(run_dir.answers)] == [1])
    assert await asyncio.to_thread(waits)
    made.interrupt()
    await playing
    assert [(row["outcome"], row["retry"]) for row in rows(tmp_path)] == [("policy_error", 0)]
    earlier = load_previous_sessions(run_dir)
    assert len(earlier.results) == 1, "it never started"
    [owed] = earlier.owed(plan_episodes(["task-0"], attempts=1, seed=0), run_seed=0)
    assert (owed.retry, owed.seed, owed.earlier) == (1, episode_seed(0, "task-0", 0, 1), None)
    assert [log.episode_id for log in logged_episodes(run_dir.answers)] == [owed.episode_id]


async def test_a_try_that_was_promised_by_one_without_a_row(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    with run_dir.owned():
        pass
    log_in(run_dir.answers, LoggedEpisode("first", "task-0", 0, 0, 7, 12.0)).start([EXCHANGE])
    log_in(run_dir.answers, LoggedEpisode("second", "task-0", 0, 1, 8, 0.0)).start([])
    earlier = load_previous_sessions(run_dir)
    assert [(one.episode_id, one.outcome, one.num_steps) for one in earlier.results] == [("first", "lost", 1)]
    [owed] = earlier.owed(plan_episodes(["task-0"], attempts=1, seed=0), run_seed=0)
    assert owed.earlier is not None
    assert (owed.earlier.episode_id, owed.retry, owed.seed) == ("first", 1, 7)
    assert [log.episode_id for log in logged_episodes(run_dir.answers)] == ["first"]


async def test_a_try_that_came_to_its_end_leaves_no_log(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    retry = RetryRules(policy_error=2, base_sec=0)
    summary = await play(experiment(tmp_path, count=2, policy=Fails(3), retry=retry, run_dir=run_dir), tmp_path)
    assert summary.complete
    assert len(rows(tmp_path)) == 5
    assert logged_episodes(run_dir.answers) == []


class Looks(MemoryTrajectoryCollector):
    """Looks at the logs when an episode is to be ended."""

    def __init__(self, answers: Path) -> None:
        super().__init__()
        self.answers = answers
        self.seen: list[EpisodeResult | None] = []

    def end_episode(self, *given: Any, **more: Any) -> Any:
        self.seen += [log.result for log in logged_episodes(self.answers)]
        return super().end_episode(*given, **more)


async def test_what_an_episode_came_to_is_logged_before_its_trajectory_is_ended(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    looks = Looks(run_dir.answers)
    await play(experiment(tmp_path, count=1, run_dir=run_dir, collectors={"looks": looks}), tmp_path)
    [logged], [row] = looks.seen, rows(tmp_path)
    assert logged is not None
    ended = EpisodeResult.from_dict(row)
    assert replace(ended, finished_at=logged.finished_at, phase_sec=logged.phase_sec) == logged
    assert logged.reward == 1.0
    assert logged_episodes(run_dir.answers) == []
