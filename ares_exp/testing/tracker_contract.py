"""Conformance suite for trackers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.records.results import EpisodeResult, ErrorInfo, Outcome, RunSummary
from ares_exp.trackers.tracker import RunInfo, SeveralTrackers, Tracker
from ares_exp.trajectories.records import EpisodeTrajectory

AT_ONCE_SEC = 10.0
"""Time limit in seconds for 200 calls that should return immediately. It is long, because the machine may be busy."""

SAMPLE = {"system/loop_lag_sec": 0.01, "system/episodes": 2.0}


def episode_result(index: int, reward: float | None = 1.0) -> EpisodeResult:
    """Returns the result of an episode, which failed if `reward` is `None`. Its id and task name contain `index`."""
    return EpisodeResult(
        episode_id=f"task-{index}__0__0000000{index}",
        task_name=f"task-{index}",
        attempt=0,
        seed=index,
        outcome=Outcome.AGENT_ERROR if reward is None else Outcome.COMPLETED,
        reward=reward,
        error=ErrorInfo("AgentError", "It failed.") if reward is None else None,
        num_steps=3,
        prompt_tokens=100,
        generated_tokens=10,
        cost=0.25,
        started_at=10.0,
        finished_at=12.5,
    )


RESULTS = (episode_result(1), episode_result(2, None), episode_result(3, 0.5))


class TrackerContract:
    """The suite for trackers. Define the fixture `tracker`."""

    @pytest.fixture
    def tracker(self) -> Tracker:
        """Returns a tracker that has not been started."""
        raise NotImplementedError

    @pytest.fixture
    def run_info(self, tmp_path: Path) -> RunInfo:
        """Returns the information about a run that is passed to the tracker's `start`."""
        config = {"seed": 3, "policy": {"model": "m", "temperature": None}, "tasks": ["a", "ü"]}
        (tmp_path / "run").mkdir()
        return RunInfo(tmp_path / "run", "a name", "0badcafe", config=config, provenance={"argv": ["ares_exp"]})

    @pytest.fixture
    def watched(self, tracker: Tracker) -> Iterator[SeveralTrackers]:
        """Yields the tracker in the same wrapper as in a run. After the test, checks that no call has failed."""
        watched = SeveralTrackers({"tracker": tracker})
        yield watched
        assert watched.failures == 0

    def test_required_members_exist(self, tracker: Tracker) -> None:
        assert isinstance(tracker, Tracker)

    def test_run_is_recorded(self, tracker: Tracker, watched: SeveralTrackers, run_info: RunInfo) -> None:
        tracker.start(run_info)
        for result in RESULTS:
            watched.log_episode(result, _trajectory(result))
        watched.log_system(SAMPLE)
        tracker.finish(RunSummary(3, RESULTS))

    def test_only_finish_may_be_slow(self, tracker: Tracker, watched: SeveralTrackers, run_info: RunInfo) -> None:
        since = time.monotonic()
        tracker.start(run_info)
        started = time.monotonic()
        for number in range(100):
            watched.log_episode(episode_result(number))
            watched.log_system(SAMPLE)
        logged = time.monotonic()
        tracker.finish(RunSummary(3, RESULTS))
        assert started - since < AT_ONCE_SEC
        assert logged - started < AT_ONCE_SEC

    def test_run_without_episodes_is_recorded(
        self, tracker: Tracker, watched: SeveralTrackers, run_info: RunInfo
    ) -> None:
        tracker.start(run_info)
        tracker.finish(RunSummary(0, ()))

    def test_resumed_run_is_recorded(self, tracker: Tracker, watched: SeveralTrackers, run_info: RunInfo) -> None:
        tracker.start(replace(run_info, resumed=True, earlier=RESULTS[:2], group="sweep", tags=("a",)))
        watched.log_episode(RESULTS[2])
        tracker.finish(RunSummary(3, RESULTS))

    def test_infinite_numbers_are_accepted(self, tracker: Tracker, watched: SeveralTrackers, run_info: RunInfo) -> None:
        tracker.start(run_info)
        watched.log_episode(replace(RESULTS[0], reward=math.inf))
        watched.log_system({"system/loop_lag_sec": math.nan})
        tracker.finish(RunSummary(1, RESULTS[:1]))

    def test_unwritable_run_directory_is_tolerated(self, tracker: Tracker, run_info: RunInfo) -> None:
        run_info.run_dir.rmdir()
        run_info.run_dir.write_text("a file")
        watched = SeveralTrackers({"tracker": tracker})
        tracker.start(run_info)
        watched.log_episode(RESULTS[0])
        tracker.finish(RunSummary(1, RESULTS[:1]))
        assert watched.failures >= 0


def _trajectory(result: EpisodeResult) -> EpisodeTrajectory:
    known: dict[str, Any] = {"start_time": 10.0, "end_time": 12.5, "total_reward": result.reward, "num_steps": 0}
    return EpisodeTrajectory(
        result.episode_id, result.task_name, (), **known, truncated=False, outcome=result.outcome, error=result.error
    )
