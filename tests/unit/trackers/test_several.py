"""Several trackers at once: each gets everything, and none can harm another."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ares_exp.records.results import EpisodeResult, RunSummary
from ares_exp.trackers.jsonl_tracker import JsonlTracker
from ares_exp.trackers.tensorboard_tracker import TensorboardTracker
from ares_exp.trackers.tracker import RunInfo, SeveralTrackers, TrackerBase
from tests.unit.trackers.tracked_run import RESULTS, patient_tracker, run_info
from tests.unit.trackers.wandb_service import LEAVES_FOLDERS
from tests.unit.trajectories.chats import chat

TRAJECTORY = chat("e1")
WITH_WANDB = [pytest.mark.slow, LEAVES_FOLDERS]


class Notes:
    """A tracker that records its calls."""

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


def execute(tracker: TrackerBase, run_dir: Path) -> None:
    tracker.start(run_info(run_dir))
    tracker.log_episode(RESULTS[0], TRAJECTORY)
    tracker.log_system({"system/a": 1.0})
    tracker.log_order({"verb": "stop"})
    tracker.finish(RunSummary(3, RESULTS))


def test_tracker_error_does_not_affect_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, last = Notes(), Notes()
    trackers = SeveralTrackers({"first": first, "broken": Raises(), "jsonl": JsonlTracker(), "last": last})
    execute(trackers, tmp_path)
    assert first.told == last.told == ["run-1", ("e1", TRAJECTORY), {"system/a": 1.0}, {"verb": "stop"}, 3]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    assert trackers.failures == 5 + Raises.failures
    assert caplog.messages == ["The tracker broken failed: OSError: start"]


def test_older_tracker_gets_only_known_calls(tmp_path: Path) -> None:
    older: Any = Older()
    trackers = SeveralTrackers({"older": older})
    execute(trackers, tmp_path)
    assert older.told == ["e1", "finish"]
    assert trackers.failures == 0


def test_all_finish_at_the_same_time(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    class Meets(Notes):
        def finish(self, summary: RunSummary) -> None:
            both.wait(60)

    trackers = SeveralTrackers({"a": Meets(), "b": Meets()})
    execute(trackers, tmp_path)
    assert trackers.failures == 0


def test_hanging_tracker_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ares_exp.trackers.tracker.FINISH_TIMEOUT_SEC", 0.05)
    go_on = threading.Event()

    class Hangs(Notes):
        def finish(self, summary: RunSummary) -> None:
            go_on.wait(60)

    trackers = SeveralTrackers({"hangs": Hangs()})
    execute(trackers, tmp_path)
    assert trackers.failures == 1
    go_on.set()


@pytest.mark.parametrize(
    ("kind", "in_the_way", "failures", "warning"),
    [
        # Every line.
        (JsonlTracker, "", 5, "tracker=jsonl failed: NotADirectoryError"),
        (TensorboardTracker, "tensorboard", 1, "tracker=tensorboard failed: FileExistsError"),
        pytest.param(
            patient_tracker, "wandb", 1, "W&B could not be started, so this run is not tracked", marks=WITH_WANDB
        ),
    ],
)
def test_unwritable_folder_is_a_warning(
    kind: Callable[[], TrackerBase], in_the_way: str, failures: int, warning: str, no_account: None, tmp_path: Path,
    log: list[str],
) -> None:  # fmt: skip
    place = tmp_path / "run" / in_the_way
    place.parent.mkdir(exist_ok=True)
    place.write_text("a file")
    tracker = kind()
    execute(tracker, tmp_path / "run")
    assert tracker.failures == failures
    assert log[0].startswith(warning)


@pytest.mark.parametrize("kind", [JsonlTracker, TensorboardTracker, pytest.param(patient_tracker, marks=WITH_WANDB)])
def test_tracker_records_from_start_to_finish(
    kind: Callable[[], TrackerBase], no_account: None, tmp_path: Path
) -> None:
    tracker = kind()
    tracker.log_episode(RESULTS[0])
    tracker.finish(RunSummary(0, ()))
    execute(tracker, tmp_path / "run")
    recorded = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert recorded
    tracker.log_episode(RESULTS[0])
    tracker.finish(RunSummary(3, RESULTS))
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == recorded
    assert tracker.failures == 0
    assert "tracker" not in {thread.name for thread in threading.enumerate()}
