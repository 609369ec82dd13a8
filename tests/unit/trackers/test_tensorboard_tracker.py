"""The event files that a run leaves, read back record by record."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.records.results import RunSummary
from ares_exp.trackers.tensorboard_tracker import TensorboardTracker
from tests.unit.trackers.event_file import EventFiles
from tests.unit.trackers.tracked_run import RESULTS, SECRET, episode, run_info


def execute(tracker: TensorboardTracker, run_dir: Path) -> EventFiles:
    tracker.start(run_info(run_dir))
    for result in RESULTS:
        tracker.log_episode(result)
    tracker.log_system({"system/loop_lag_sec": 0.5})
    tracker.finish(RunSummary(3, RESULTS, wall_sec=4.0))
    return EventFiles(run_dir / "tensorboard")


def test_scalars_use_finished_tries_as_step(tmp_path: Path) -> None:
    tracker = TensorboardTracker()
    recorded = execute(tracker, tmp_path)
    assert tracker.failures == 0
    assert recorded.scalars["episode/reward"] == [(1, 1.0), (3, 0.5)]
    assert recorded.scalars["episode/num_steps"] == [(1, 1), (2, 2), (3, 3)]
    assert recorded.scalars["progress/mean_reward"][-1] == (3, 0.75)
    assert recorded.scalars["outcome/agent_error"][-1] == (3, 1)
    assert recorded.scalars["run/mean_reward"] == [(3, 0.75)]
    assert recorded.scalars["stat/mean_reward"] == [(3, 0.5)]
    assert recorded.scalars["run/wall_sec"] == [(3, 4.0)]
    assert recorded.scalars["run/interrupted"] == [(3, 0)]


def test_histograms_are_over_the_attempts(tmp_path: Path) -> None:
    tracker = TensorboardTracker()
    tracker.start(run_info(tmp_path))
    tries = (episode(1, None), episode(1, 1.0, retry=1), episode(2, 0.5), episode(3, math.nan))
    tracker.finish(RunSummary(3, tries))
    histograms = EventFiles(tmp_path / "tensorboard").histograms
    assert (histograms["attempts/reward"].num, histograms["attempts/reward"].sum) == (2, 1.5)
    assert (histograms["attempts/num_steps"].min, histograms["attempts/num_steps"].max) == (1, 3)
    assert histograms["attempts/duration_sec"].num == 3
    assert tracker.failures == 0


def test_config_and_provenance_are_texts_without_secrets(tmp_path: Path) -> None:
    recorded = execute(TensorboardTracker(), tmp_path)
    ((step, config),) = recorded.texts["config/text_summary"]
    assert step == 0
    assert json.loads(config.removeprefix("```json\n").removesuffix("\n```"))["policy"]["api_key"] == "***"
    assert "seed=3" in recorded.texts["provenance/text_summary"][0][1]
    assert SECRET.encode() not in recorded.files[0].read_bytes()


def test_resumed_run_continues_at_the_right_step(tmp_path: Path) -> None:
    first = TensorboardTracker(clock=lambda: 15.0)
    first.start(run_info(tmp_path))
    first.log_episode(RESULTS[0])
    first.log_episode(RESULTS[1])
    first.finish(RunSummary(3, RESULTS[:2], interrupted=True))

    second = TensorboardTracker(clock=lambda: 110.0)
    second.start(run_info(tmp_path, resumed=True, earlier=RESULTS[:2]))
    second.log_episode(RESULTS[2])
    second.log_system({"system/threads": 3})
    second.finish(RunSummary(3, RESULTS))

    recorded = EventFiles(tmp_path / "tensorboard")
    assert len(recorded.files) == 2
    assert recorded.scalars["episode/num_steps"] == [(1, 1), (2, 2), (3, 3)]
    assert recorded.scalars["progress/mean_reward"][-1] == (3, 0.75)
    assert recorded.scalars["run/finished"] == [(2, 2), (3, 3)]
    assert recorded.scalars["system/threads"] == [(100, 3)]  # seconds since the first episode of all started
    assert [step for step, _ in recorded.texts["config/text_summary"]] == [0, 2]
    assert sorted(set(recorded.times)) == [15.0, 110.0]


def test_missing_package_is_reported_at_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "ares_exp.trackers.tensorboard_tracker.find_spec",
        lambda name: None if name == "tensorboardX" else find_spec(name),
    )
    with pytest.raises(ConfigError, match=r"pip install 'ares-exp\[tensorboard\]'"):
        TensorboardTracker()
