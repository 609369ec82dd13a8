"""Several trackers at once: each gets everything, and none can harm another."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_summary import RunSummary
from ares_exp.trackers import several
from ares_exp.trackers.jsonl_tracker import JsonlTracker
from ares_exp.trackers.several import SeveralTrackers
from ares_exp.trackers.tracker import NullTracker, RunInfo, Tracker
from tests.unit.trackers.tracked_run import RESULTS, run_info


class Notes:
    """A tracker that notes what it is told."""

    failures = 0

    def __init__(self) -> None:
        self.told: list[Any] = []

    def start(self, run: RunInfo) -> None:
        self.told.append(run.run_id)

    def log_episode(self, result: EpisodeResult, trajectory: Any = None) -> None:
        self.told.append((result.episode_id, trajectory))

    def log_system(self, sample: Mapping[str, float]) -> None:
        self.told.append(sample)

    def log_order(self, line: Mapping[str, Any]) -> None:
        self.told.append(line)

    def finish(self, summary: RunSummary) -> None:
        self.told.append(summary.planned)


class Raises:
    """A tracker that is none: everything fails."""

    failures = 2

    def start(self, run: RunInfo) -> None:
        raise OSError("start")

    def log_episode(self, result: EpisodeResult, trajectory: Any = None) -> None:
        raise OSError("episode")

    def log_system(self, sample: Mapping[str, float]) -> None:
        raise OSError("system")

    def log_order(self, line: Mapping[str, Any]) -> None:
        raise OSError("order")

    def finish(self, summary: RunSummary) -> None:
        raise OSError("finish")


class Older:
    """A tracker from before there were system metrics and trajectories, and that counts no failures."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, run: RunInfo) -> None: ...

    def log_episode(self, result: EpisodeResult) -> None:
        self.told.append(result.episode_id)

    def finish(self, summary: RunSummary) -> None:
        self.told.append("finish")


def execute(tracker: Tracker, run_dir: Path) -> None:
    trajectory: Any = "a trajectory"
    tracker.start(run_info(run_dir))
    tracker.log_episode(RESULTS[0], trajectory)
    tracker.log_system({"system/a": 1.0})
    tracker.log_order({"verb": "stop"})
    tracker.finish(RunSummary(3, RESULTS))


def test_one_that_raises_fails_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, last = Notes(), Notes()
    trackers = SeveralTrackers({"first": first, "broken": Raises(), "jsonl": JsonlTracker(), "last": last})
    execute(trackers, tmp_path)
    assert first.told == last.told == ["run-1", ("e1", "a trajectory"), {"system/a": 1.0}, {"verb": "stop"}, 3]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    assert trackers.failures == 5 + Raises.failures
    assert caplog.messages == ["The tracker broken failed: OSError: start"]


def test_an_older_tracker_is_asked_only_for_what_it_knows(tmp_path: Path) -> None:
    older: Any = Older()
    trackers = SeveralTrackers({"older": older})
    execute(trackers, tmp_path)
    assert older.told == ["e1", "finish"]
    assert trackers.failures == 0


def test_it_is_a_mapping_by_name() -> None:
    none = NullTracker()
    trackers = SeveralTrackers({"none": none, "jsonl": JsonlTracker()})
    assert [*trackers] == ["none", "jsonl"]
    assert (trackers["none"], len(trackers)) == (none, 2)


def test_all_finish_at_the_same_time(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    class Meets(Notes):
        def finish(self, summary: RunSummary) -> None:
            both.wait(60)

    trackers = SeveralTrackers({"a": Meets(), "b": Meets()})
    execute(trackers, tmp_path)
    assert trackers.failures == 0


def test_one_that_never_finishes_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "FINISH_TIMEOUT_SEC", 0.05)
    go_on = threading.Event()

    class Hangs(Notes):
        def finish(self, summary: RunSummary) -> None:
            go_on.wait(60)

    trackers = SeveralTrackers({"hangs": Hangs()})
    execute(trackers, tmp_path)
    assert trackers.failures == 1
    go_on.set()
