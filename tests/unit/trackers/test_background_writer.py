"""The thread in which trackers write."""

import json
import logging
import threading
from pathlib import Path

import pytest

from ares_exp.records.results import RunSummary
from ares_exp.trackers import jsonl_tracker, tensorboard_tracker
from ares_exp.trackers.jsonl_tracker import JsonlTracker
from ares_exp.trackers.tensorboard_tracker import TensorboardTracker
from ares_exp.trackers.tracker import BackgroundWriter
from tests.unit.trackers.event_file import EventFiles
from tests.unit.trackers.tracked_run import RESULTS, run_info


def test_all_work_is_done_in_order() -> None:
    done: list[int] = []
    writer = BackgroundWriter("It")
    writer.start()
    for number in range(1000):
        writer.do(lambda number=number: done.append(number))  # type: ignore[misc]
    writer.finish(60)
    assert done == [*range(1000)]


def test_failures_are_counted_and_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    done: list[int] = []
    writer = BackgroundWriter("It")
    writer.start()
    writer.do(lambda: 1 / 0)
    writer.do(lambda: done.append(1))
    writer.do(lambda: 1 / 0)
    writer.finish(60)
    assert (writer.failures, done) == (2, [1])
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    assert caplog.messages[0] == "It failed: ZeroDivisionError: division by zero"


def test_hanging_work_does_not_affect_the_next_run() -> None:
    done: list[str] = []
    go_on = threading.Event()
    writer = BackgroundWriter("It")
    writer.start()
    writer.do(go_on.wait)
    writer.do(lambda: done.append("old"))
    writer.finish(0.01)
    assert writer.failures == 1
    writer.start()
    writer.do(lambda: done.append("new"))
    writer.finish(60)
    assert done == ["new"]
    go_on.set()


@pytest.mark.parametrize("kind", [JsonlTracker, TensorboardTracker])
def test_late_writes_go_to_their_own_run(
    kind: type[JsonlTracker] | type[TensorboardTracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_responds = threading.Event()

    class OnHungDisk(BackgroundWriter):
        def start(self) -> None:
            super().start()
            self.do(disk_responds.wait)

    for module in (jsonl_tracker, tensorboard_tracker):
        monkeypatch.setattr(module, "BackgroundWriter", OnHungDisk)
    tracker = kind(finish_timeout_sec=0.05)
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        tracker.start(run_info(tmp_path / folder))
        tracker.log_episode(RESULTS[0])
        tracker.finish(RunSummary(1, RESULTS[:1]))
    writing = [thread for thread in threading.enumerate() if thread.name == "tracker"]
    disk_responds.set()
    for thread in writing:
        thread.join(60)
    for folder in ("first", "second"):
        if kind is JsonlTracker:
            lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line)["kind"] for line in lines] == ["start", "episode", "finish"]
        else:
            assert EventFiles(tmp_path / folder / "tensorboard").scalars["progress/finished"] == [(1, 1.0)]
